"""Calls of tools in answers, read in the form in which the model's chat template writes them."""
