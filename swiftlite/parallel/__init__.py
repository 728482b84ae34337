"""Parallelism applied from outside to an unmodified Hugging Face model: data, tensor, pipeline, context, experts."""
