"""Which weights are trained: all of them, adapters (by peft), or the last layers.

Trained weights are fp32 masters whatever the compute precision; frozen ones stay in the compute type.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.errors import UserError, first_line
from swiftlite.imports import import_package
from swiftlite.models.adapters import continue_adapter, refuse_adapted_head, wrap
from swiftlite.models.anatomy import SCORE_HEAD, beside_text, dissect, head_of
from swiftlite.quick_imports import quick_imports

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from swiftlite.config.schema import RunConfig


def grow_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Give embedding and head at least `size` rows; added ones are the mean of the old ones, also in a head's bias."""
    old = model.get_input_embeddings().weight.shape[0]
    if size <= old:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(size, mean_resizing=False)
    for module in {model.get_input_embeddings(), model.get_output_embeddings()} - {None}:
        for parameter in module.parameters(recurse=False):
            parameter.data[old:] = parameter.data[:old].mean(0, keepdim=True)


def apply_tuner(
    model: PreTrainedModel, config: RunConfig, adapter: Path | None, say: Callable[[str], None]
) -> nn.Module:
    """Freeze and unfreeze as `--tuner` says; under LoRA wrap the model by peft.

    model: with or without memory behind its weights; adapter: an adapter folder to go on from, whose weights are read
    later; say: is told what the user should know of it. Returns the module that holds the result: the model, or a peft
    model around it.
    Raises UserError.
    """
    if config.tuner == "lora":
        return _add_lora(model, config, adapter, say)
    if config.tuner == "freeze":
        _freeze(model, config, say)
        return model
    for parameter in (beside := beside_text(model)).values():
        parameter.requires_grad_(False)
    if beside:
        example = next(iter(beside))
        say(f"no text goes through {len(beside)} tensors of the model, which stay as they are: {example} and others")
    return model


def _freeze(model: PreTrainedModel, config: RunConfig, say: Callable[[str], None]) -> None:
    anatomy, beside = dissect(model), beside_text(model).keys()
    fixed = {parameter for parameter in model.parameters() if not parameter.requires_grad}  # by the class itself
    model.requires_grad_(False)
    layers, wanted = anatomy.layers, config.trainable_layers
    if abs(wanted) > len(layers):
        raise UserError(
            f"--trainable-layers {wanted} is more than the model's {len(layers)} layers",
            fix=f"give at most {len(layers)}",
        )
    for layer in layers[len(layers) - wanted :] if wanted > 0 else layers[:-wanted]:  # negative: the first ones
        for parameter in set(layer.parameters()) - fixed:
            parameter.requires_grad_(True)
    if anatomy.gives_scores:  # a new score head is zero, and as long as it is, no gradient comes through it
        anatomy.head.requires_grad_(True)
    if config.new_tokens:  # their rows are only learnt if embedding and head are trained
        for part in (anatomy.embedding, anatomy.head):
            part.requires_grad_(True)
    for pattern in config.trainable_modules:
        named = _compiled(pattern)
        every = model.named_parameters(remove_duplicate=False)  # a head that is the embedding has a name of its own
        found = {name: parameter for name, parameter in every if named.search(name) and parameter not in fixed}
        if idle := found.keys() & beside:
            _tell_idle(found, idle, pattern, "--trainable-modules", say)
        for name in found.keys() - beside:
            found[name].requires_grad_(True)
        if not found:
            raise UserError(
                f"no parameter that can be trained is named like {pattern!r}",
                where="--trainable-modules",
                fix="give a part of a parameter name or a regular expression, such as norm or layers\\.0\\.",
            )


def _tell_idle(
    named: Collection[str], idle: Collection[str], word: str, option: str, say: Callable[[str], None]
) -> None:
    """Tell of tensors that are to be trained, and that no text goes through: they would learn nothing. named: all that
    the word means. Raises UserError where it means none but such."""
    if len(idle) == len(named):
        raise UserError(f"no text goes through {word!r}, which would learn nothing", where=option, fix="leave it out")
    say(f"no text goes through {len(idle)} tensors that {option} names by {word!r}, which stay as they are")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"{pattern!r} is no regular expression: {error}",
            where="--trainable-modules",
            fix="put a \\ before what stands for itself",
        ) from error


def _add_lora(model: PreTrainedModel, config: RunConfig, adapter: Path | None, say: Callable[[str], None]) -> nn.Module:
    with quick_imports():
        peft = import_package("peft", "--tuner lora")
        from swiftlite.models.lora_targets import check_named, left_out, unread_by_text

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of choices that are made for it below
        if adapter is not None:
            return _continue(model, adapter, say)
        kept, beside = list(config.modules_to_save), beside_text(model)
        for word in kept:
            named = [name for name, _ in model.named_parameters() if f".{word}." in f".{name}"]
            if idle := [name for name in named if name in beside]:
                _tell_idle(named, idle, word, "--modules-to-save", say)
        if config.new_tokens:  # their rows are only learnt if embedding and head are trained
            kept += [name for name in _embedding_names(model) if name not in kept]
        classifies = head_of(model) is not model.get_output_embeddings()
        if classifies and SCORE_HEAD not in kept:
            kept.append(SCORE_HEAD)
        targets = list(config.target_modules)
        all_linear = targets == ["all-linear"]
        settings = peft.LoraConfig(
            task_type="SEQ_CLS" if classifies else "CAUSAL_LM",
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules="all-linear" if all_linear else check_named(model, targets),
            exclude_modules=(left_out(model, say) if all_linear else unread_by_text(model)) or None,
            modules_to_save=kept or None,
            use_dora=config.dora,
            use_rslora=config.rslora,
            ensure_weight_tying=bool(kept) and not classifies and _stays_tied(model),
        )
        try:
            wrapped = wrap(model, settings)
        except ValueError as error:
            _refuse_unknown_names(model, settings, config)
            raise _not_added(model, config, error) from error
    _refuse_unknown_names(model, settings, config)
    refuse_adapted_head(wrapped)
    return wrapped


def _continue(model: PreTrainedModel, adapter: Path, say: Callable[[str], None]) -> nn.Module:
    wrapped = continue_adapter(model, adapter)
    if idle := [name for name, parameter in beside_text(model).items() if parameter.requires_grad]:
        say(f"no text goes through {len(idle)} tensors of the adapter, which stay as they are: {idle[0]} and others")
    return wrapped


def _not_added(model: PreTrainedModel, config: RunConfig, error: ValueError) -> UserError:
    """error: of peft, which has started to wrap the model."""
    if "ParamWrapper" not in str(error):  # of what it puts around a parameter that holds several matrices
        fix = f"name other linear layers of the model, {'leave --dora out, ' if config.dora else ''}or use --tuner full"
        return UserError(f"LoRA cannot be added: {first_line(error)}", where="--target-modules", fix=fix)
    asked = {"--dora": config.dora, "--lora-dropout": config.lora_dropout}
    ends = {model.get_input_embeddings(), head_of(model)}
    around = {name.rpartition(".")[2] for name, module in model.named_modules() if module in ends}
    others = " ".join(name for name in _matrices(model) if name not in around)
    return UserError(
        "LoRA on the matrices of experts, which lie in one parameter, takes neither DoRA nor dropout",
        where=", ".join(flag for flag, value in asked.items() if value) or "--target-modules",
        fix=f"leave that out, or adapt the layers beside the experts alone: --target-modules {others}",
    )


def _refuse_unknown_names(model: PreTrainedModel, settings: LoraConfig, config: RunConfig) -> None:
    """peft passes over a name that no module has, as long as another one has a module. A name that is gone from its
    settings was understood: `all-linear`, and those of experts' matrices that lie in one parameter.
    """
    known = [name for name, _ in model.named_modules()]
    given = {
        "--target-modules": [name for name in config.target_modules if name in (settings.target_modules or ())],
        "--modules-to-save": config.modules_to_save,
    }
    for option, wanted in given.items():
        for word in wanted:
            if not any(name == word or name.endswith(f".{word}") for name in known):
                fix = f"name some of {', '.join(_matrices(model))}"
                raise UserError(f"the model has no module {word!r}", where=option, fix=fix)


def _matrices(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of the model's matrices, each once, in its order, as they are without adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    kinds = (nn.Linear, nn.Embedding, BaseTunerLayer)
    inside = {"lora_A", "lora_B", "original_module", "modules_to_save"}
    names = [name.split(".") for name, module in model.named_modules() if isinstance(module, kinds)]
    return list(dict.fromkeys(parts[-1] for parts in names if parts[-1] != "base_layer" and inside.isdisjoint(parts)))


def _embedding_names(model: PreTrainedModel) -> list[str]:
    wanted = {id(model.get_input_embeddings())}
    if not _stays_tied(model):
        wanted.add(id(model.get_output_embeddings()))
    return [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if id(module) in wanted]


def _stays_tied(model: PreTrainedModel) -> bool:
    """Whether peft keeps embedding and head tied where they are trained whole. It knows embeddings by a few names; of
    others, such as GPT-2's, embedding and head become two.
    """
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module is embedding]
    return head is not None and head.weight is embedding.weight and names[0] in EMBEDDING_LAYER_NAMES


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Iterator[None]:
    """The models as they are without adapters, inside the block.

    peft's own switch also takes the gradient off adapters and gives it back, which FSDP need not see.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    switched = [module for model in models for module in model.modules() if isinstance(module, kinds)]
    for module in switched:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switched:
            module._disable_adapters = False


def to_master_precision(model: nn.Module, masters: torch.dtype) -> None:
    """Trained parameters in the type of masters; frozen ones as they are."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != masters:
            parameter.data = parameter.data.to(masters)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trained, all) parameters; a tied tensor counts once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)
