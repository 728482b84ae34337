"""Attention for documents laid end to end, on CPUs and GPUs."""
