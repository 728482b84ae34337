"""What is told of a run: on the terminal, in its folder, on pages and to trackers."""
