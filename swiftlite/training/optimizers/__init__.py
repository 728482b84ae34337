"""Optimizers of our own: AdamW in bytes, in bf16 and on the host, and Muon."""
