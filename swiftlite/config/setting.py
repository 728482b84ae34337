"""How a setting of the schema is written down, and the panels of the help that settings stand in."""

from typing import Any

from pydantic import Field

MODEL, DATA, TUNER, OPTIMIZATION = "Model", "Data", "Tuner", "Optimization"
PREFERENCE, REINFORCEMENT = "Preference", "Reinforcement"
PARALLELISM, MEMORY = "Parallelism", "Memory and speed"
CHECKPOINTS, LOGGING, RUN = "Checkpoints", "Logging", "Run"
PANELS = (
    MODEL, DATA, TUNER, PREFERENCE, REINFORCEMENT, OPTIMIZATION, PARALLELISM, MEMORY, CHECKPOINTS, LOGGING, RUN,
)  # fmt: skip


def flag(default: Any, panel: str, text: str, *aliases: str, shown: str | None = None, **more: Any) -> Any:
    """A setting. text: its help sentence; aliases: other accepted names; shown: the default in words where None is not.

    more: further fields of `swiftlite.config.flags.Flag`: `metavar` and `short` for the help, `bare` for the value of
    the flag without one, `env` for an environment variable, `switches` of other tools that stand for one value,
    {name: value}; `phrases`: names of theirs whose values say it in another way, {name: {pattern of theirs: ours}};
    `nested` of a map whose values may be lists and mappings too.
    """
    extra = {"panel": panel, "aliases": list(aliases), "shown": shown, **more}
    if isinstance(default, list | dict):
        return Field(default_factory=default.copy, description=text, json_schema_extra=extra)
    return Field(default, description=text, json_schema_extra=extra)
