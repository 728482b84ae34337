"""The best checkpoint of a run: whether it still counts and is still there, and how it becomes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.checkpoint.folder import step_folder
from swiftlite.checkpoint.state import copy_model
from swiftlite.config.changes import OF_THE_LOSS, OF_THE_REWARD, OF_THE_WEIGHTS
from swiftlite.config.methods import PREFERENCE, answers, evaluates_as_it_samples
from swiftlite.reporting.curves import evaluated
from swiftlite.training.progress import Progress

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig

Say = Callable[[str], None]
IsThere = Callable[[int], bool]  # whether some process has the checkpoint of a step in its output folder
CreateAndWrite = tuple[Callable[[Path], None], Callable[[Path], None]]


def evaluated_in_words(config: RunConfig) -> str:
    """What evaluations are compared by."""
    return evaluated("reward" if answers(config) else "loss")[1]


def best_in_words(config: RunConfig, loss: float) -> tuple[str, str]:
    """(what it is the best by, its value). loss: of the best evaluation, as `Evaluation` has it."""
    most, value = ("highest", 0.0 - loss) if answers(config) else ("least", loss)
    return f"the {most} {evaluated_in_words(config)}", f"{value:.4g}"


def forget_other_losses(progress: Progress, config: RunConfig, settings: Mapping[str, str], say: Say) -> None:
    """A loss that is made otherwise now is no spike among those before, nor do evaluations of it say anything about
    those to come. Evaluations of sft and pretraining have the cross-entropy in any case, so they are no measure only
    where weights are rounded otherwise. settings: that have changed, in words."""
    if any(name in (*OF_THE_LOSS, *OF_THE_WEIGHTS) for name in settings):
        progress.recent_losses.clear()
    by_reward = answers(config) or "reward" in settings
    judged_by = OF_THE_REWARD if by_reward else OF_THE_LOSS if config.method in PREFERENCE else ()
    if by_reward and evaluates_as_it_samples(config):
        judged_by = (*judged_by, "temperature")
    changed = [words for name, words in settings.items() if name in (*judged_by, *OF_THE_WEIGHTS)]
    if changed and progress.best_loss is not None:
        progress.best_loss = progress.best_step = progress.best_step_loss = None
        progress.evaluations_without_gain = 0
        say(f"the best evaluation so far is none any more: it had {', '.join(changed)}")


def forget_lost_best(progress: Progress, config: RunConfig, is_there: IsThere, say: Say) -> None:
    """The best one may lie in the folder that the run was started in, or somebody has removed it."""
    step, loss = progress.best_step, progress.best_step_loss
    if step is None or is_there(step):
        return
    if config.result == "best":
        most, value = best_in_words(config, loss)
        say(
            f"warning: step {step:,}, which has {most} so far ({value}), is not in "
            f"{Path(config.output_dir) / 'checkpoints'}: --result best takes the best of those that follow"
        )
    progress.best_step, progress.best_step_loss = None, None


def best_model(
    config: RunConfig, best: tuple[int | None, float | None], output: Path, is_there: IsThere, say: Say
) -> CreateAndWrite | None:
    """How the best checkpoint becomes the result, as `write_together` wants it; None where it is not to, or there is
    none. best: its step and loss."""
    if config.result == "last":
        return None
    step, loss = best
    if step is None:
        say("warning: no best checkpoint is known, so model/ has the last weights")
        return None
    if not is_there(step):
        say(f"warning: step {step:,}, the best, is gone, so model/ has the last weights")
        return None
    most, value = best_in_words(config, loss)
    say(f"model/ is step {step:,}, which has {most} ({value})")
    return (lambda folder: copy_model(step_folder(output, step), folder)), lambda folder: None
