"""From files to batches: sources, rows, tokens with the spans that are learnt, packs, and the audit of all of it."""
