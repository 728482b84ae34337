"""The same numbers, computed faster: products, norms, rotary embeddings, LoRA, the last layer."""
