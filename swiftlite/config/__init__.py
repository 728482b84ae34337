"""The one schema behind flags, recipes, help and the saved configuration, and how the values of a run resolve."""
