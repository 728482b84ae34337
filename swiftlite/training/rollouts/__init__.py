"""What a model answers while it is trained: asked, rewarded, and learnt from or evaluated by."""
