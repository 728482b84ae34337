"""The settings of what a run does when time, disk or a process ends before it does."""

from typing import Annotated, Literal

from pydantic import BaseModel

from swiftlite.config.setting import CHECKPOINTS, RUN, flag
from swiftlite.config.types import Duration, NullWord, Spelling, Whole, switch


class SurvivalSettings(BaseModel):
    """A part of `RunConfig`."""

    on_save_failure: Annotated[Literal["stop", "continue"], Spelling()] = flag(
        "stop", CHECKPOINTS, "Where a checkpoint cannot be saved: end the run, or train on and try again at the next."
    )
    async_save: Annotated[Literal["auto", "on", "off"], Spelling(switch("on", "off"))] = flag(
        "auto",
        CHECKPOINTS,
        "Write checkpoints while training goes on, from a copy in the host's memory; `auto`: on GPUs.",
        bare="on",
    )
    on_loss_spike: Annotated[Literal["stop", "warn"], Spelling()] = flag(
        "stop", RUN, "A loss that jumps far above all recent ones for three steps: end the run, or only say so."
    )
    warm_check: bool = flag(
        True, RUN, "Try the longest micro-batches once before the first step, so that too little memory shows at once."
    )
    stop_after: Annotated[Duration | None, NullWord] = flag(
        None,
        RUN,
        "Time after which the run saves a checkpoint and ends, for clusters with a limit: 3h55m, 90m.",
        shown="no limit",
        metavar="3h55m|90m|1d",
    )
    max_restarts: Whole = flag(
        0, RUN, "How often to start again from the newest checkpoint after a failure while running."
    )
