"""From a config to a model that is ready to train, in the one order that works in every layout.

Structure on `meta` -> vocabulary, adapters, freezing -> cut along the mesh (`divide`) -> memory -> each process reads
its part of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftlite.checkpoint.catalog import Catalog, stored_tensors
from swiftlite.checkpoint.export import ModelFiles, plan_files
from swiftlite.checkpoint.safetensors_files import inspect_model_folder
from swiftlite.checkpoint.start_values import FreshValues, start_dora
from swiftlite.checkpoint.weights import TensorFolder, fill, materialize
from swiftlite.data.tokens.stops import padding_token
from swiftlite.errors import UserError
from swiftlite.imports import import_package
from swiftlite.models.anatomy import balances_router, decoder_of, expert_share, why_alone, with_router_loss
from swiftlite.models.architecture import import_architecture
from swiftlite.models.attention import documents as attention
from swiftlite.models.compiled import left_out_of
from swiftlite.models.dtypes import DTYPES, source_dtype
from swiftlite.models.kernels import fp8
from swiftlite.models.kernels.liger import PACKAGE, apply_liger, choose_kernels
from swiftlite.models.kernels.lora import is_lora_b
from swiftlite.models.load import build_model, load_config_of, model_folder, own_attention
from swiftlite.models.matrices import hidden_matrices
from swiftlite.models.overrides import told_of_overrides
from swiftlite.models.quantize import NF4, packing
from swiftlite.models.rotary import scale_by_document
from swiftlite.models.tuners import apply_tuner, grow_vocabulary, to_master_precision
from swiftlite.parallel.data import DataParallel, reshard
from swiftlite.parallel.experts import check_expert_parallel
from swiftlite.parallel.mesh import Mesh, build_mesh
from swiftlite.parallel.world import World
from swiftlite.planning.choose import Choice
from swiftlite.planning.memory import free_bytes
from swiftlite.sizes import in_words
from swiftlite.training.divide import Divided, divide
from swiftlite.training.guards.agreement import check_same_weights
from swiftlite.training.guards.fits import check_alone, check_config, check_division, check_host
from swiftlite.training.needs import Beside, Outline, choose, weights_dtype
from swiftlite.training.precision import Precision, describe_device, resolve_precision
from swiftlite.training.qat import check_rounding, gathered_in, use_qat
from swiftlite.training.sources import (
    drawn_values,
    find_weights,
    has_scores,
    in_wrapped_names,
    match_files,
    new_rows,
    new_scores,
    read_on_top,
    starts_at_random,
    text_alone_in_words,
    unread_in_words,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swiftlite.config.layout import Layout
    from swiftlite.config.schema import RunConfig

AT_RANDOM = "the weights start at random: nothing of the model but its shape and its tokenizer is used"


@dataclass
class Trainee:
    """What is trained, and what is known of the whole of it.

    model: the base or a peft model around it, base: the causal language model inside; both whole, of which a pipeline
    trains copies. divided: what this process trains; files: how the result is laid out; trained_shapes: of every
    trained parameter of the whole model; matrices: the names of those that Muon takes; parameters: (trained, all);
    has_new_head: no file held the score head. kernels: `liger` or `none`; free: bytes of a device before weights
    loaded; alone: why documents have rows of their own, if they have. notes: what the user should know of how the
    model is trained; updates: of its weights since they were loaded.
    """

    model: nn.Module
    base: PreTrainedModel
    mesh: Mesh
    choice: Choice
    precision: Precision
    divided: Divided
    files: ModelFiles
    trained_shapes: dict[str, tuple[int, ...]]
    matrices: frozenset[str]
    parameters: tuple[int, int]
    has_new_head: bool
    kernels: str
    free: int
    alone: str | None
    notes: list[str]
    updates: int = 0

    @property
    def layout_words(self) -> str:
        reason = f" ({self.choice.reason})" if self.choice.reason else ""
        return self.choice.layout.describe() + reason

    @property
    def device_words(self) -> str:
        kernels = ", Liger's kernels" if self.kernels == "liger" else ""
        return f"{describe_device(self.mesh.device)}, {self.precision.words}{kernels}"

    @property
    def memory_words(self) -> str | None:
        """None on a CPU, of which as much is not known."""
        if self.mesh.device.type == "cpu":
            return None
        total = self.choice.held.total
        words = f"about {in_words(total)} at the peak of a step, of {in_words(self.free)} free on a device"
        return words if total <= self.free else f"{words}; `swiftlite plan` shows what would fit"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this process has to save of everything that belongs to the model's files, by its name in the whole."""
        return ((name, tensor) for part in self.divided.parts for name, tensor, counts in part.tensors() if counts)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """This process's part of every trained parameter."""
        return [(name, p) for part in self.divided.parts for name, p, _ in part.tensors() if _is_trained(p)]

    def check(self, config: RunConfig) -> None:
        """Run a few tokens, as in a step of `config`, but for what is compiled there: it runs as it is written, since
        the shapes of these few tokens would be compiled for nothing else.

        Raises UserError for an architecture that cannot be trained as it is.
        """
        for part in self.divided.parts:
            as_written = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
            # FSDP's weights are in the compute type
            with self.precision.compute(self.mesh.device), as_written, told_of_overrides(config):
                part.scorer.check(config.max_length, self.mesh.device)
            reshard(part.scorer)

    def uncounted(self) -> set[int]:
        """Ids of the trained parameters here that are copies of a tied one which another stage counts and saves."""
        return {id(p) for part in self.divided.parts for _, p, counts in part.tensors() if not counts}


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def check_model(config: RunConfig, layout: Layout, device: torch.device, resume: Path | None) -> PretrainedConfig:
    """Everything that can be known of the model without its weights. Raises UserError where it cannot be trained."""
    if config.optimizer == "adamw_8bit":
        import_package("bitsandbytes", "--optimizer adamw_8bit", "bitsandbytes")
    if config.quantization == NF4:
        import_package("bitsandbytes", "--quantization nf4", "bitsandbytes")
    if config.kernels == "liger":
        import_package(PACKAGE, "--kernels liger", "liger")
    if config.fp8 != "none":
        import_package(fp8.PACKAGE, "--fp8", "fp8")
    model_config = load_config_of(config)
    check_config(config, model_config)
    described = with_router_loss(model_config, config.router_aux_loss_coef)
    if config.fp8 != "none":
        fp8.check_fp8(described, fp8.capability_of(device))
    source, _ = find_weights(config, resume)
    if not starts_at_random(config, resume) and Path(source).expanduser().is_dir():
        inspect_model_folder(Path(source).expanduser())
    check_division(config, layout, model_config)
    import_architecture(model_config, classifier=config.method == "rm")
    if config.qat != "none":
        precision = precision_of(config, model_config, device)
        check_rounding(build_base(source, config, described, precision), config.qat, device)
    return model_config


def vocabulary_of(config: RunConfig, model_config: PretrainedConfig) -> int | None:
    """How many tokens the model knows; None where it does not say, or grows to the tokenizer's size."""
    grows = config.new_tokens or config.adapter
    return None if grows else getattr(model_config.get_text_config(), "vocab_size", None)


def build_trainee(
    config: RunConfig,
    model_config: PretrainedConfig,
    resume: Path | None,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase],
    world: World,
    layout: Layout,
    choice: Choice | None = None,
    *,
    evaluates: bool = False,
    beside: Beside | None = None,
) -> Trainee:
    """Build, divide and load the model. resume: a checkpoint folder whose weights to take; choice: of a model that this
    one lies beside, made when all memory was free; evaluates: nothing of it will be trained; beside: what will lie
    beside it.

    Raises UserError where the model, the adapter or a flag does not fit.
    """
    given = model_config
    model_config = with_router_loss(given, config.router_aux_loss_coef)  # a copy: a reference is built from it as well
    precision = precision_of(config, model_config, world.device)
    source, adapter = find_weights(config, resume)
    if config.method == "rm":
        _describe_scores(model_config, load_tokenizer())
    base = build_base(source, config, model_config, precision)
    if alone := why_alone(base):
        check_alone(config, layout, base, alone)
        base.set_attn_implementation(own_attention(base))
    else:
        scale_by_document(base)
    weights, on_disk, new_head, notes = _find_values(base, source, config, resume, world, load_tokenizer)
    initial = drawn_values(base, config.seed) if weights is None else None
    plain_names = {id(tensor): name for name, tensor in stored_tensors(base)}
    notes += text_alone_in_words(base, given)
    notes += [left_out] if config.compile and (left_out := left_out_of(decoder_of(base))) else []
    model = apply_tuner(base, config, adapter, notes.append)
    _settle_trained(model, base, config, notes.append, evaluates=evaluates)
    sources = [] if weights is None else [(weights, in_wrapped_names(on_disk, plain_names, model))]
    sources += read_on_top(model, base, weights, adapter, None if source == str(resume) else resume)
    check_same_weights(world, given, [folder for folder, _ in sources])
    rows = {} if weights is None else new_rows(on_disk, weights, model)
    fresh = FreshValues(config.seed, rows | new_scores(model, new_head), initial)
    check_expert_parallel(base, layout)
    kernels = _fuse(config, base, world.device, layout, notes.append)
    to_master_precision(model, precision.masters)
    outline = Outline.of(config, base, model_config, precision, world.device, kernels, beside, evaluates=evaluates)
    free = world.least("free memory", free_bytes(world.device))  # or ranks would decide differently
    if choice is None:
        choice = choose(config, outline, free, layout)
        check_host(config, outline, choice)
    is_new = new_head is not None and not any(has_scores(folder) for folder, _ in sources)
    known = {"has_new_head": is_new, "free": free, "alone": alone, "notes": notes}
    trainee = _divide_on_meta(config, model, outline, choice, given, **known)
    _give_values(trainee, sources, fresh, starts=adapter is None)
    world.meet("values")
    return trainee


def _find_values(
    base: PreTrainedModel,
    source: str,
    config: RunConfig,
    resume: Path | None,
    world: World,
    load_tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> tuple[TensorFolder | None, Catalog, str | None, list[str]]:
    """(the files of the weights, what they hold, the name of a score head that they lack, notes); no files where the
    weights start at random. Rows of new tokens are in the base afterwards."""
    weights = None if starts_at_random(config, resume) else TensorFolder(model_folder(source, revision=config.revision))
    world.meet("weights")  # some machines may have had to download them
    if weights is None or source == str(resume):  # whose files have the rows of new tokens
        _grow(base, config, load_tokenizer)
    if weights is None:
        return None, [], None, [AT_RANDOM]
    on_disk, new_head = match_files(weights, base)
    notes = unread_in_words(weights, on_disk, base)
    if weights.coded:
        packed = "" if config.quantization != "none" else "; --quantization nf4 packs the layers into 4 bits again"
        notes.append(f"the model's files hold codes, which are read as the numbers that they stand for{packed}")
    _grow(base, config, load_tokenizer)
    return weights, on_disk, new_head, notes


def _give_values(
    trainee: Trainee, sources: list[tuple[TensorFolder, Catalog]], fresh: FreshValues, *, starts: bool
) -> None:
    """Memory, and what belongs there. starts: adapters are new."""
    device = trainee.mesh.device
    for part in trainee.divided.parts:
        materialize(part.scorer, torch.device("cpu") if trainee.choice.offload else device, device)
        fill(packing(part.model, ((name, tensor) for name, tensor, _ in part.tensors())), sources, fresh)
        if starts:
            start_dora(part.model)


def _settle_trained(
    model: nn.Module, base: PreTrainedModel, config: RunConfig, tell: Callable[[str], None], *, evaluates: bool
) -> None:
    """Of an evaluation nothing; adapters are small, and stay in fp32 as they were trained. Raises UserError where what
    is trained is nothing, or not what a setting is of."""
    if evaluates:
        if config.tuner != "lora":
            model.requires_grad_(False)
        return
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("no parameter is trained", where="--tuner", fix="choose other layers or modules to train")
    if config.lora_plus_ratio != 1 and not any(is_lora_b(name) for name, _ in trained):
        what = f"--lora-plus-ratio {config.lora_plus_ratio:g} is of LoRA's B matrices, and the adapter has none"
        raise UserError(what, where="--adapter", fix="leave --lora-plus-ratio out")
    if config.optimizer == "muon" and hidden_matrices(base).isdisjoint(id(parameter) for _, parameter in trained):
        tell("no matrix of a layer is trained, so --optimizer muon is AdamW here")


def precision_of(config: RunConfig, model_config: PretrainedConfig, device: torch.device) -> Precision:
    """What the settings say, `auto` being what the device is fast at."""
    width = 0 if expert_share(model_config) < 1 else model_config.get_text_config().hidden_size
    return resolve_precision(config.precision, device, pure_bf16=config.pure_bf16, fp8=config.fp8, width=width)


def build_base(source: str, config: RunConfig, model_config: PretrainedConfig, precision: Precision) -> PreTrainedModel:
    with told_of_overrides(config):
        return build_model(
            source,
            model_config,
            dtype=weights_dtype(config, precision),
            attention=attention.register(),
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            classifier=config.method == "rm",
        )


def _grow(base: PreTrainedModel, config: RunConfig, load_tokenizer: Callable[[], PreTrainedTokenizerBase]) -> None:
    if config.new_tokens or config.adapter:  # which may have been trained with new tokens
        grow_vocabulary(base, len(load_tokenizer()))


def _fuse(
    config: RunConfig, base: PreTrainedModel, device: torch.device, layout: Layout, tell: Callable[[str], None]
) -> str:
    """Exchange what `--kernels` says. Returns whose kernels are used."""
    divided = config.compile or layout.tp > 1
    kernels = choose_kernels(config.kernels, base.config.model_type, device, divided=divided, tell=tell)
    if kernels == "liger":
        apply_liger(base)
    return kernels


def _describe_scores(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """What a sequence classifier's config has to say: one score, and where padding begins (for others' inference).

    transformers reads the score at the last token that is no padding: were that what answers end with, as many models
    have it, it would read one token too early. The tokenizer says the same, so that batches are filled up by it.
    """
    model_config.num_labels = 1
    text = model_config.get_text_config()
    text.pad_token_id = padding_token(text, tokenizer)
    if text.pad_token_id is not None and text.pad_token_id < len(tokenizer):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(text.pad_token_id)


def _divide_on_meta(
    config: RunConfig,
    model: nn.Module,
    outline: Outline,
    choice: Choice,
    given: PretrainedConfig,
    *,
    has_new_head: bool,
    free: int,
    alone: str | None,
    notes: list[str],
) -> Trainee:
    """What is known of the whole model, and then its parts. given: the config of its files; the others: as `Trainee`
    has them."""
    base, precision = outline.base, outline.precision
    mesh = build_mesh(choice.layout, outline.device, grouped=choice.offload)
    saved_dtype = DTYPES[config.save_dtype] if config.save_dtype != "auto" else source_dtype(given)
    files = plan_files(model, base, dtype=saved_dtype, max_shard_size=config.max_shard_size)
    notes += use_qat(base, config, saved_dtype, mesh.device)
    if (balances := balances_router(base.config)) != balances_router(given):
        files = replace(files, gives_router_logits=not balances)
    hidden = hidden_matrices(base) if config.optimizer == "muon" else ()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    shapes = {name: tuple(parameter.shape) for name, parameter in trained}
    matrices = frozenset(name for name, parameter in trained if id(parameter) in hidden)
    options = DataParallel(
        dtype=gathered_in(config, precision, saved_dtype),
        sharding=choice.layout.sharding,
        offload=choice.offload,
        min_params=config.fsdp_min_params,
        background_sums=not (config.optimizer_in_backward or config.sync_every_microbatch or config.pure_bf16),
        evaluates=outline.evaluates,
    )
    return Trainee(
        model=model,
        base=base,
        mesh=mesh,
        choice=choice,
        precision=precision,
        divided=divide(model, base, mesh, options, precision, choice.checkpointing, config),
        files=files,
        trained_shapes=shapes,
        matrices=matrices,
        parameters=(outline.trained, outline.trained + outline.frozen),
        has_new_head=has_new_head,
        kernels=outline.kernels,
        free=free,
        alone=alone,
        notes=notes,
    )
