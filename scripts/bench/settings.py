"""What a benchmark compares: tools and their settings, and the goals that its figures are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MICRO_BATCH, ACCUMULATION, MAX_LENGTH = 4, 2, 1024

Command = Callable[[Path, Any, Path, int], list[str]]  # (the tool's Python, workload, folder, steps) -> command line


@dataclass(frozen=True)
class Setting:
    """tool and name say which run it is; kind: `swiftlite`, `shipped` or `tuned`.

    packed: a step holds 8 packs of max length instead of 8 rows, so fewer steps see as many tokens.
    """

    tool: str
    name: str
    kind: str
    flags: tuple[str, ...] = ()
    packed: bool = False


@dataclass(frozen=True)
class Benchmark:
    """What is compared, by which figure.

    name: of the marks around its table in the document; rate: the field of `measure.Run` that counts; pack_tokens: of
    swiftlite's packs; kinds: those of the peers' settings that swiftlite's rate is held against, with the factor to
    reach; first_step and memory: the share of the fastest and of the leanest peer to stay under (None: no goal).
    """

    name: str
    rate: str
    settings: tuple[Setting, ...]
    commands: Mapping[str, Command]
    pack_tokens: int
    kinds: Mapping[str, float]
    first_step: float | None
    memory: float

    @property
    def unit(self) -> str:
        return self.rate.removesuffix("_per_second") + "/s"

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(self.commands)

    def command(self, setting: Setting, python: Path, workload: Any, output: Path, steps: int) -> list[str]:
        """The command of `setting` by the tool's own entry point beside `python`, for `steps` optimizer steps."""
        return [*self.commands[setting.tool](python, workload, output, steps), *setting.flags]
