"""What `--model` and `--adapter` of commands that use a finished model stand for: a base model, perhaps an adapter,
and their tokenizer.

A path may be a model folder, an adapter folder (its base is found from `adapter_config.json`), a checkpoint, which
holds the files of either, or the output folder of a run, whose `model/` is meant.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from swiftlite.checkpoint.folder import MANIFEST, check_folder
from swiftlite.checkpoint.safetensors_files import ADAPTER, TensorEntry, inspect_file, inspect_model_folder
from swiftlite.config.names import ADAPTER_CONFIG, HUB_ID, check_name, gives_scores, model_name
from swiftlite.errors import UserError
from swiftlite.models.load import check_model_path, read_settings
from swiftlite.models.tokenizer import TOKENIZER_FILES

MODEL_CONFIG = "config.json"
MODEL_FLAG = "--model"


@dataclass(frozen=True)
class ModelSource:
    """base: folder or hub id of the weights; adapter: folder of a peft adapter on top; tokenizer: folder or hub id.
    No folder begins with `~`."""

    base: str
    adapter: Path | None
    tokenizer: str

    @property
    def base_folder(self) -> Path | None:
        """None for a hub id."""
        return Path(self.base) if Path(self.base).is_dir() else None

    def is_classifier(self) -> bool:
        """Whether it gives scores instead of words, as reward models do. Raises UserError."""
        if self.adapter is not None:
            return read_settings(self.adapter / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"
        config = Path(self.base) / MODEL_CONFIG
        return config.is_file() and gives_scores(read_settings(config).get("architectures"))


def find_source(model: str | None, adapter: str | None, flag: str = MODEL_FLAG) -> ModelSource:
    """Settles what to load. flag: that named the model.

    Raises UserError where a name leads nowhere or the two do not go together.
    """
    if model is None and adapter is None:
        fix = "add --model with a folder, a hub id or a short name (qwen3-0.6b)"
        raise UserError("no model is named", where=flag, fix=fix)
    for by, name in ((flag, model), ("--adapter", adapter)):
        if name is not None:
            check_name(name, by)
    named = None if model is None else _inside_run(_resolve(model), f"{flag} {model}")
    if adapter is None:
        if _is_adapter(named):
            return _with_adapter(Path(named), None, flag)
        return _checked(ModelSource(named, None, named))
    folder = _inside_run(str(_place(adapter)), f"--adapter {adapter}")
    if not _is_adapter(folder):
        raise UserError(
            f"the adapter folder has no {ADAPTER_CONFIG}" if Path(folder).is_dir() else "there is no such folder",
            where=f"--adapter {adapter}",
            fix="name the folder that a LoRA run wrote (OUT/model, or a checkpoint); a whole model goes to --model",
        )
    if named is not None and _is_adapter(named):
        raise UserError(
            "--model is an adapter too", where=f"--model {model}", fix="give the base model, or leave --model out"
        )
    return _with_adapter(Path(folder), named, flag)


def refuse_reward_model(source: ModelSource) -> None:
    """Raises UserError for a model that gives scores instead of words."""
    if source.is_classifier():
        raise UserError(
            "this is a reward model: it gives scores, no answers",
            where=str(source.adapter or source.base),
            fix="name a model that sft, pretrain, dpo, kto or grpo trained",
        )


def _resolve(name: str) -> str:
    path = _place(name)
    return str(path) if path.is_dir() else model_name(name)


def _place(name: str) -> Path:
    """Whole where it begins with a dash: commands would read it as a flag."""
    path = Path(name).expanduser()
    return path.absolute() if str(path).startswith("-") else path


def _is_adapter(name: str) -> bool:
    return (Path(name) / ADAPTER_CONFIG).is_file()


def _inside_run(name: str, where: str) -> str:
    """`name` itself, or the model inside the output folder of a run."""
    folder = Path(name)
    if not folder.is_dir() or any((folder / file).is_file() for file in (MODEL_CONFIG, ADAPTER_CONFIG)):
        return name
    result = folder / "model"
    if any((result / file).is_file() for file in (MODEL_CONFIG, ADAPTER_CONFIG)):
        return str(result)
    checkpoints = sorted([*folder.glob("checkpoints/step-*"), *folder.glob("step-*")])
    if checkpoints:
        raise UserError(
            "the folder holds checkpoints, but no model/ of a run that has finished",
            where=where,
            fix=f"name a checkpoint, such as {checkpoints[-1]}",
        )
    raise UserError(
        f"the folder holds neither a model ({MODEL_CONFIG}) nor an adapter ({ADAPTER_CONFIG}) nor a run (model/)",
        where=where,
        fix="check the path",
    )


def _with_adapter(folder: Path, base: str | None, flag: str) -> ModelSource:
    """The adapter in `folder` on the base that is given, else on the one it was trained on."""
    source = base or _base_of(folder, flag)
    own_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return _checked(ModelSource(source, folder, str(folder) if own_tokenizer else source))


def _base_of(folder: Path, flag: str) -> str:
    """The model that an adapter was trained on, as its settings have it. Raises UserError where there is none."""
    path = folder / ADAPTER_CONFIG
    base = read_settings(path).get("base_model_name_or_path")
    both = f"{MODEL_FLAG} BASE --adapter {shlex.quote(str(folder))}"
    fix = f"name it: {both}"
    if flag != MODEL_FLAG:  # which takes one name
        fix = f"merge the two by `swiftlite export {both} --output-dir FOLDER`, and name the result"
    if not isinstance(base, str) or not base:
        raise UserError("the adapter does not say which model it belongs to", where=str(path), fix=fix)
    check_name(base, str(path))
    place = Path(base).expanduser()
    if not place.is_dir() and HUB_ID.fullmatch(base) is None:
        raise UserError(f"the adapter's base model is not where it was: {base}", where=str(path), fix=fix)
    return str(place) if place.is_dir() else base


def check_base_folder(source: ModelSource, revision: str | None) -> dict[str, TensorEntry]:
    """The tensors of a base that is a folder, by their names. Raises UserError where they cannot be read, or where a
    revision of it is wanted."""
    if source.base_folder is None:
        return {}
    if revision is not None:
        raise UserError("a local folder has no revisions", where=f"--revision {revision}", fix="leave --revision out")
    return inspect_model_folder(source.base_folder)


def _checked(source: ModelSource) -> ModelSource:
    check_model_path(source.base)
    for folder in (Path(source.base), source.adapter):
        if folder is not None and (folder / MANIFEST).is_file() and (problems := check_folder(folder, deep=True)):
            raise UserError(
                f"the checkpoint is damaged: {problems[0]}", where=str(folder), fix="name another checkpoint of the run"
            )
    if source.adapter is not None:
        inspect_file(source.adapter / ADAPTER)  # peft would read a pickle where there are no safetensors
    return source
