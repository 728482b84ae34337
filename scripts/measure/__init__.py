"""Parts of `scripts/measure_layouts.py`: worlds, bytes that travel, memory held, files read and written, tables."""
