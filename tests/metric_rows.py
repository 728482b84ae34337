"""Rows of metrics as a run logs them, for tests of what shows them."""

from swiftlite.reporting.metrics import read_metrics

FACTS = {"model": "org/some-[bold]model[/]", "data": "3 rows", "output": "runs/x"}


def row(step, **changes):
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 3.0 - step / 10,
        "learning_rate": 1e-4,
        "grad_norm": 1.5,
        "trained_tokens": 50,
        "tokens": 100,
        "tokens_per_second": 200.0,
        "step_seconds": 0.5,
        "data_seconds": 0.0002,
        "peak_memory_gib": 1.25,
        "mfu": None,
    } | changes


def steps(output):
    return [found["step"] for found in read_metrics(output)]
