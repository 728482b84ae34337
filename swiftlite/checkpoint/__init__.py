"""Weights and states of runs on disk: safetensors in and out of divided models, whole or not there at all."""
