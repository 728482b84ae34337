"""What is done with a finished model: answers, evaluation, export, and serving by an engine."""
