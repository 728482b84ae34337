"""Parts of the fuzzing campaign (scripts/fuzz_inputs.py)."""
