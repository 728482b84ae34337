"""Curves out of metrics rows: what plots, page and live panel draw."""

from __future__ import annotations

from typing import Any

from swiftlite.config.methods import TOKEN_ACCURACY

SHORTEST_SPAN, LONGEST_SPAN = 3, 10  # rows that a moving average reaches back
MOST_POINTS = 2048
EVALUATIONS = {
    "eval_loss": "Evaluation loss",
    "eval_reward": "Evaluation reward",
    "eval_reward_best": "Reward of the best answer to a prompt, evaluated",
}
LARGEST = 1e100  # no training has such numbers, and the span of two of them may be infinite


class Average:
    """Exponential moving average, corrected for its start (Adam's bias correction, arXiv 1412.6980, section 3).

    It reaches back over a tenth of the run, so that in a short one it does not lag behind the curve.
    """

    def __init__(self, rows: float) -> None:
        self._sum, self._weight = 0.0, 0.0
        self.expect(rows)

    def expect(self, rows: float) -> None:
        """rows: how many there will be, as far as is known now."""
        self._share = 1 / min(max(rows / 10, SHORTEST_SPAN), LONGEST_SPAN)

    def add(self, value: float) -> float:
        self._sum += self._share * (value - self._sum)
        self._weight += self._share * (1 - self._weight)
        return self._sum / self._weight


class Curve:
    """A series that stays small however long the run: when it is full, neighbours are averaged pair by pair."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._stride, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._stride:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) >= MOST_POINTS:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._stride *= 2


def smoothed(values: list[float]) -> list[float]:
    """The moving average after each value."""
    average = Average(len(values))
    return [average.add(value) for value in values]


def number(value: Any) -> float | None:
    """The value where it is a number that can be drawn: files may hold anything."""
    drawn = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    return value if drawn else None


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows that have a number under the key."""
    points = [(row["step"], value) for row in rows if key in row and (value := number(row[key])) is not None]
    return [step for step, _ in points], [value for _, value in points]


def is_added(key: str) -> bool:
    """Whether some methods alone have it."""
    return "/" in key or key.removeprefix("eval_") == TOKEN_ACCURACY


def added_groups(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The keys that some methods add, such as `rewards/margin`, by what is drawn on one scale."""
    groups: dict[str, list[str]] = {}
    for key in sorted({key for row in rows for key in row if is_added(key)}):
        kind, _, name = key.partition("/")
        of = kind.removeprefix("eval_")
        if of == "answers":
            scale = f"answers/{name}"
        elif (of, name) == ("rewards", "accuracy"):
            scale = "accuracy"
        else:  # an evaluation's accuracy beside that of training
            scale = of if of == TOKEN_ACCURACY else kind
        groups.setdefault(scale, []).append(key)
    return groups


def curve_of(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """(the key that tells how a run goes, what it is in words): of a model that learns from its own answers their
    reward, since the loss of such answers is about 0 however good they are; else the loss, as a mean over trained
    tokens, or over pairs or single answers."""
    if any("reward" in row or ("eval_reward" in row and "eval_loss" not in row) for row in rows):  # before step 1
        return "reward", "reward per answer"
    compared = any(key.startswith("rewards/") for row in rows for key in row)  # a teacher's KL has a slash too
    return "loss", "loss per pair or answer" if compared else "loss per trained token"


def evaluated(key: str) -> tuple[str, str]:
    """(the key of the same on held-out rows, what it is called). key: of `curve_of`."""
    return f"eval_{key}", f"eval {key}"
