"""From rows to tokens, and which of them are learnt."""
