"""Hugging Face models as they are: loaded, taken apart by their structure, adapted, and computed faster."""
