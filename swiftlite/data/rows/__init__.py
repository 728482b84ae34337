"""From what `--dataset` names to rows of one form each, whatever they are spelt like."""
