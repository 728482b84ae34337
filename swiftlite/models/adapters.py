"""Models wrapped by peft, and adapters of an earlier training, swiftlite's or anyone's, to go on from.

The base model lies on `meta` when it is wrapped, and its weights are read later: kinds of adapters that are made from
the base's weights, or that change more than layers, cannot be gone on with.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.errors import UserError, first_line
from swiftlite.models.anatomy import ANSWER_HEADS, SCORE_HEAD, head_of
from swiftlite.untrusted import existing

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

KINDS = ("LORA", "IA3", "LOHA", "LOKR", "BOFT", "LN_TUNING")  # peft's names
# Starts that take a part of the base's weights away: what the file holds fits the rest, which nobody has kept.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
CLASSIFIERS = (SCORE_HEAD, "classifier")  # heads that peft saves of whatever is said to classify
NEEDED_ELSEWHERE = {  # settings of LoRA that need more than wrapped layers
    "trainable_token_indices": "trains rows of the embedding",
    "alora_invocation_tokens": "acts from its invocation tokens on only",
}


def check_kind(settings: PeftConfig, adapter: Path) -> None:
    """Raise UserError where an adapter cannot be gone on with."""
    check_start(settings, adapter)
    kind = getattr(settings.peft_type, "value", settings.peft_type)
    more = next((why for name, why in NEEDED_ELSEWHERE.items() if getattr(settings, name, None)), None)
    if kind not in KINDS:
        raise _unsupported(f"is of the kind {kind}", adapter, f"give one of the kinds {', '.join(KINDS)}")
    if more is not None:
        raise _unsupported(more, adapter, "merge it into its base by peft, and give the result to --model")


def check_start(settings: PeftConfig, adapter: Path) -> None:
    """Raise UserError where an adapter is not all in its file: peft would compute the rest anew, and otherwise."""
    start = str(getattr(settings, "init_lora_weights", ""))
    if start.startswith(CHANGES_BASE):
        raise _unsupported(
            f"began with init_lora_weights {start}, which changes the base model's weights",
            adapter,
            "save it by peft with path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
        )


def _unsupported(what: str, adapter: Path, fix: str) -> UserError:
    return UserError(f"the adapter {what}, which is not supported", where=str(adapter), fix=fix)


def continue_adapter(model: PreTrainedModel, adapter: Path) -> nn.Module:
    """The model wrapped as the adapter's settings say. Its values are read later. Raises UserError."""
    import peft

    try:
        settings = peft.PeftConfig.from_pretrained(str(adapter))
        check_kind(settings, adapter)
        settings.inference_mode = False
        _settle_task(settings, model)
        wrapped = wrap(model, settings)
    except (AttributeError, ValueError, RuntimeError, OSError, TypeError) as error:
        raise UserError(
            f"the adapter does not fit the model: {first_line(error)}",
            where=str(adapter),
            fix="give the base model that adapter_config.json names",
        ) from error
    refuse_adapted_head(wrapped)
    return wrapped


def _settle_task(settings: PeftConfig, model: PreTrainedModel) -> None:
    """What the method makes of the adapter counts, not what it was trained for: a reward model may begin with one that
    has learnt to answer. peft adds heads of its own to the other kind's settings."""
    gives_scores = head_of(model) is not model.get_output_embeddings()
    settings.task_type = "SEQ_CLS" if gives_scores else "CAUSAL_LM"
    if getattr(settings, "modules_to_save", None) is not None:
        gone = (*CLASSIFIERS, *ANSWER_HEADS) if gives_scores else CLASSIFIERS
        kept = [name for name in settings.modules_to_save if name not in gone]
        settings.modules_to_save = [*kept, *[SCORE_HEAD] * gives_scores] or None


def wrap(model: PreTrainedModel, settings: PeftConfig) -> nn.Module:
    """The model in peft's wrapper. Raises what peft does, which are ValueErrors most of the time."""
    import peft

    on_meta = all(p.is_meta for p in model.parameters())  # numbers drawn for adapters would be lost there
    with torch.device("meta") if on_meta else nullcontext():  # peft's `low_cpu_mem_usage` unties tied weights
        wrapped = peft.get_peft_model(model, settings)
    found = wrapped.peft_config["default"]
    if base := existing(model.name_or_path):  # the adapter finds it from any folder
        found.base_model_name_or_path = str(base.absolute())
    if found.modules_to_save:  # to which peft adds a classifier's head each time
        found.modules_to_save = list(dict.fromkeys(found.modules_to_save))
    if isinstance(getattr(found, "target_modules", None), set | list):
        found.target_modules = _short(model, set(found.target_modules))
        _forget_excluded(found, wrapped.base_model.targeted_module_names)
    return wrapped


def _forget_excluded(settings: PeftConfig, adapted: list[str]) -> None:
    """Take out of its settings what an adapter names and then excludes wherever it is: engines make matrices of each
    name, or refuse one that they do not know. A name of nothing stays, to be refused. adapted: its modules."""
    excluded = getattr(settings, "exclude_modules", None)
    if not isinstance(excluded, set | list):
        return
    named = {name for name in settings.target_modules if _is_among(adapted, name)}
    unknown = {
        name
        for name in settings.target_modules
        if not (_is_among(excluded, name) or any(_is_among([name], each) for each in excluded))
    }
    settings.target_modules = named | unknown
    needed = {module for module in excluded if any(_is_among([module], name) for name in settings.target_modules)}
    settings.exclude_modules = needed or None


def _is_among(modules: Iterable[str], name: str) -> bool:
    """Whether it is the name of one of them, or the last part of one, as peft asks."""
    return any(module == name or module.endswith(f".{name}") for module in modules)


def _short(model: PreTrainedModel, targets: set[str]) -> set[str]:
    """The last parts of modules' names where all that end in it are meant, else whole names. Of `all-linear` peft makes
    whole ones: older releases of SGLang and lmdeploy find no module by them, and lmdeploy 0.18 mixes them up with the
    short names of other adapters."""
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in targets}
    return {name if (last := name.rpartition(".")[2]) in others else last for name in targets}


def refuse_adapted_head(wrapped: nn.Module) -> None:
    """Raise UserError where the output head has an adapter: log-probabilities are made of its weight alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(wrapped.get_base_model().get_output_embeddings(), BaseTunerLayer):
        raise UserError(
            "LoRA on the output head is not supported", fix="train the head whole with --modules-to-save lm_head"
        )
