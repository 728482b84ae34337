"""The run: what it needs, its steps in every layout, its optimizers, and what it leaves behind."""
