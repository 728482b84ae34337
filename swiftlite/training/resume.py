"""Where a run goes on: the checkpoint it was told of, or the newest that is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.checkpoint.claim import Claim
from swiftlite.checkpoint.folder import check_folder, list_checkpoints, newest_checkpoint
from swiftlite.checkpoint.space import check_place
from swiftlite.config.changes import FIXED, changed_settings
from swiftlite.config.names import ADAPTER_CONFIG
from swiftlite.errors import UserError
from swiftlite.parallel.world import World

if TYPE_CHECKING:
    from swiftlite.config.schema import RunConfig


def find_resume(config: RunConfig, output: Path, claim: Claim, world: World, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, or None for a fresh run. Raises UserError where neither is possible.

    claim: on the output folder, taken by rank 0 if that is there; say: is told which newer checkpoints were passed
    over, and why, and which settings have changed. Rank 0 reads and hashes them for all.
    """
    if world.rank == 0 and output.is_dir():
        claim.take()
    found = _find_resume(config, output, say) if world.rank == 0 else None
    if found is not None:
        _compare_settings(config, found, say)
    text = world.same("resume", str(found or ""))
    return Path(text) if text else None


def _find_resume(config: RunConfig, output: Path, say: Callable[[str], None]) -> Path | None:
    check_place(output)
    used = _is_used(output)
    if config.resume == "never":
        if used:
            raise used_already(output)
        return None
    if config.resume != "auto":
        folder = Path(config.resume).expanduser()
        if list_checkpoints(folder):  # of a whole run the newest
            folder = _newest_sound(folder, say) or folder
        return _named_checkpoint(folder, output, used)
    if used and not (output / "config.yaml").is_file():
        raise UserError(
            "the output folder holds something else than a run", where=str(output), fix="choose another --output-dir"
        )
    newest = _newest_sound(output, say)
    if newest is None and list_checkpoints(output):
        raise UserError(
            "no checkpoint of the run is sound: each was passed over",
            where=str(output),
            fix="choose another --output-dir, or move checkpoints/ away to train from the start",
        )
    if newest is None and (output / "model").exists():
        raise UserError(
            "the run has a result, but no checkpoint that it could go on from",
            where=str(output),
            fix="choose another --output-dir, or move model/ away to train from the start",
        )
    if newest is None:
        say(f"--resume auto: there is no checkpoint in {output} yet, the run starts from the beginning")
    return newest


def _newest_sound(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run that can be used; `say` is told of newer ones."""
    newest, passed_over = newest_checkpoint(run)
    for reason in passed_over:
        say(f"passed over {reason}")
    return newest


def used_already(output: Path) -> UserError:
    """The error for a fresh run into a folder that holds something."""
    return UserError(
        "the output folder exists and is not empty",
        where=str(output),
        fix="choose another --output-dir, or go on with --resume auto",
    )


def _is_used(output: Path) -> bool:
    return output.exists() and any(not entry.name.startswith(".") for entry in output.iterdir())


def _named_checkpoint(folder: Path, output: Path, used: bool) -> Path:
    problems = check_folder(folder, deep=True) if folder.is_dir() else ["it is not a folder"]
    if problems:
        beside = list_checkpoints(folder.parent.parent) or list_checkpoints(folder)
        complete = next((other for other in beside if other != folder and not check_folder(other)), None)
        such = f", such as {complete}, or use --resume auto" if complete else ", or start a new run"
        raise UserError(
            f"the checkpoint cannot be used: {'; '.join(problems[:3])}",
            where=str(folder),
            fix=f"name a complete checkpoint folder{such}",
        )
    existing = [other.resolve() for other in list_checkpoints(output)]
    begun = (output / "config.yaml").is_file() and not (output / "model").exists()  # by a run that has saved nothing
    if used and (folder.resolve() != existing[0] if existing else not begun):
        raise UserError(
            "the output folder holds another run, or newer checkpoints than the one to resume from",
            where=str(output),
            fix="give another --output-dir, which leaves them as they are",
        )
    return folder


def without_gone_adapter(config: RunConfig, resume: Path | None, say: Callable[[str], None]) -> RunConfig:
    """What to read by where the folder of `--adapter` is gone: the checkpoint has its weights and the tokenizer. What
    is saved keeps the names that were given, since a checkpoint is deleted some day."""
    if config.adapter is None or resume is None or (Path(config.adapter).expanduser() / ADAPTER_CONFIG).is_file():
        return config
    say(f"note: {config.adapter} holds no adapter any more: its weights and tokenizer are those of the checkpoint")
    of_adapter = config.tokenizer in (None, config.adapter)
    return config.model_copy(update={"tokenizer": str(resume)}) if of_adapter else config


def run_settings(checkpoint: Path) -> Path:
    """The `config.yaml` of the run that a checkpoint is of."""
    return checkpoint.resolve().parent.parent / "config.yaml"


def _compare_settings(config: RunConfig, checkpoint: Path, say: Callable[[str], None]) -> None:
    """Tell what has changed. Raises UserError where the checkpoint has it from its run."""
    settings = run_settings(checkpoint)
    changed = changed_settings(settings, config)
    fixed = [words for name, words in changed.items() if name in FIXED or (name == "optimizer" and "muon" in words)]
    if fixed:
        raise UserError(
            f"a run cannot go on with other settings of what is trained, and how: {', '.join(fixed)}",
            where=str(checkpoint),
            fix=f"resume with those of {settings}, or start a new run",
        )
    if changed:
        say(f"changed since the run last started: {', '.join(changed.values())}")
