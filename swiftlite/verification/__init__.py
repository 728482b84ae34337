"""Proof that layouts agree: the same few steps in each layout and in one process, compared."""
