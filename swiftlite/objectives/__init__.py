"""From hidden states to losses: token log-probabilities, and each method's loss as a pure function of them."""
