"""Where the parts of a Hugging Face causal language model are, found from its own structure and config.

Everything that differs between architectures and that swiftlite has to know stands in this file.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from swiftlite.config.names import COMPRESSED_TENSORS, codes_section, schemes_of
from swiftlite.errors import UserError
from swiftlite.models.logits import LogitTransform, find_transform

# Kinds of layers, as configs name them, in which documents of one row stay apart. A state that runs on from token to
# token would run on into the next document; chunks, compressed keys and the like would be counted from the row's start.
ATTENTION_KINDS = ("full_attention", "sliding_attention", "attention")

# Architectures, as configs name them, whose layers do not tell attention where documents begin, and why.
NOT_TOLD_OF_BORDERS = {
    "doge": "attention with a mask of its own making",
    "nemotron": "layers that hand no keyword arguments on to their attention",
}

DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "jitter_noise", "jitter_eps")  # how configs name them
OTHER_HEADS = ("classifier_", "summary_")  # whose dropouts: those of classes that are not trained here

# What configs call the number of experts of a mixture, and of those that a token meets.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")

ROUTER_WEIGHT = "router_aux_loss_coef"  # what configs call that of the loss that balances routers
QUERY_NORM = re.compile(r"\bq(uery)?_(layer)?norm$")  # what architectures call that of queries
SCORE_HEAD = "score"  # what transformers calls the head of a sequence classifier
ANSWER_HEADS = ("lm_head", "embed_out")  # and that of a model that answers, which the classifier made of it is without


@dataclass(frozen=True)
class Anatomy:
    """The parts: `decoder` turns tokens into hidden states, `layers` are its blocks, `head` gives logits, or one score
    of a whole sequence where `gives_scores`.
    """

    decoder: nn.Module
    layers: nn.ModuleList
    embedding: nn.Module
    head: nn.Module
    transform: LogitTransform
    gives_scores: bool


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The output head of a causal language model, or the score head of a sequence classifier."""
    head = model.get_output_embeddings()
    return model._modules.get(SCORE_HEAD) if head is None else head


def set_head(model: PreTrainedModel, head: nn.Module) -> None:
    """Put another module in its place."""
    if SCORE_HEAD in model._modules:
        setattr(model, SCORE_HEAD, head)
    else:
        model.set_output_embeddings(head)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part that turns tokens into hidden states; the model itself where it has no such part."""
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    embedding = model.get_input_embeddings()  # Llama 4's decoder has another name than its class says
    return next((part for part in model.children() if embedding in part.children()), model)


def dissect(model: PreTrainedModel) -> Anatomy:
    """Find the parts of a causal language model, or of a sequence classifier built on its decoder.

    Raises UserError naming the architecture where one is missing.
    """
    decoder, head, gives_scores = decoder_of(model), head_of(model), SCORE_HEAD in model._modules
    if decoder is model or decoder is head or head is None or not isinstance(head, nn.Module):
        raise UserError(
            f"{type(model).__name__} has no separate decoder and output head",
            fix="use a decoder-only model for causal language modelling",
        )
    if strange := {name.rpartition(".")[2] for name, _ in head.named_parameters()} - {"weight", "bias"}:
        raise UserError(  # where they are near 1 or 0, logits would not show that nobody trains them
            f"{type(model).__name__} has an output head with weights that swiftlite does not know: "
            f"{', '.join(sorted(strange))}",
            fix="use another model, or report the architecture",
        )
    return Anatomy(
        decoder=decoder,
        layers=_find_layers(decoder, model.config.get_text_config().num_hidden_layers),
        embedding=model.get_input_embeddings(),
        head=head,
        transform=LogitTransform() if gives_scores else find_transform(model, decoder, head),
        gives_scores=gives_scores,
    )


def beside_text(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters that no text goes through, by their names, such as those of a tower for images: of a model decoder
    and head are run alone."""
    anatomy = dissect(model)
    used = {id(p) for part in (anatomy.decoder, anatomy.embedding, anatomy.head) for p in part.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in used}


def parts_beside_text(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The largest modules that have some of these parameters and no others, by their names."""
    beside = {id(parameter) for parameter in beside_text(model).values()}

    def below(module: nn.Module, place: str) -> Iterator[tuple[str, nn.Module]]:
        for name, part in module.named_children():
            of_part = [id(parameter) in beside for parameter in part.parameters()]
            if of_part and all(of_part):
                yield place + name, part
            elif any(of_part):
                yield from below(part, f"{place}{name}.")

    return dict(below(model, "")) if beside else {}


def _find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(decoder).__name__} has no list of its {count} layers",
        fix="use a model whose blocks stand in one ModuleList",
    )


def keep_layers(config: PretrainedConfig, layers: range) -> None:
    """Let a config speak of a range of its layers only: their number, and what it says layer by layer."""
    depth = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[layers.start : layers.stop])
    config.num_hidden_layers = len(layers)


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether a forward pass of the model, with adapters that are in it, draws random numbers in training."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    values = model.config.get_text_config().to_dict()
    shares = [value for key, value in values.items() if key.endswith(DROPOUTS) and not key.startswith(OTHER_HEADS)]
    return any(share and isinstance(share, float) for share in shares)


def expert_share(config: PretrainedConfig) -> float:
    """The share of a mixture's experts that a token meets; 1 where there are none, or it cannot be known."""
    count, chosen = _experts(config)
    return chosen / count if count else 1.0


def experts_of_token(config: PretrainedConfig) -> float:
    """How many of a mixture's experts a token meets; 0 where there are none."""
    return _experts(config)[1]


def expert_count(config: PretrainedConfig) -> float:
    """How many experts a layer of a mixture has; 0 where there are none."""
    return _experts(config)[0]


def _experts(config: PretrainedConfig) -> tuple[float, float]:
    """(how many a layer has, how many of them a token meets); zeros where there are none, or it cannot be known."""
    values = config.get_text_config().to_dict()
    count, chosen = (_first_number(values, names) for names in (EXPERTS, EXPERTS_OF_TOKEN))
    return (count, chosen) if count and chosen else (0, 0)


def has_head_norms(model: PreTrainedModel) -> bool:
    """Whether queries and keys have norms of their own."""
    return any(QUERY_NORM.search(name) for name, _ in dissect(model).layers.named_modules())


def _first_number(values: dict, names: tuple[str, ...]) -> float | None:
    """The first of these that a config has; the mean where it says one for each layer."""
    found = next((values[name] for name in names if values.get(name)), None)
    return sum(found) / len(found) if isinstance(found, list | tuple) else found


def attention_heads(config: PretrainedConfig) -> int:
    """Of a layer; 1 where a config has no word for it, as those of state space models."""
    return getattr(config, "num_attention_heads", None) or 1


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """(of queries and keys, of values): how many numbers a head of attention has. Latent attention's differ."""
    config = config.get_text_config()
    values = config.to_dict()
    size = values.get("head_dim") or config.hidden_size // attention_heads(config)
    if values.get("qk_nope_head_dim"):
        size = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    return size, values.get("v_head_dim") or size


def attention_windows(config: PretrainedConfig) -> list[int | None]:
    """For each layer how many tokens one of them sees: its sliding window, None where it sees all before it, 0 where
    there is no attention."""
    config = config.get_text_config()
    values = config.to_dict()
    windows = dict.fromkeys(ATTENTION_KINDS) | {"sliding_attention": values.get("sliding_window")}
    kinds = values.get("layer_types") or ["sliding_attention"] * config.num_hidden_layers
    return [windows.get(kind, 0) for kind in kinds]


def tokens_in_view(length: int, window: int | None) -> float:
    """How many tokens one of a document of some length sees, on average, in a layer with such a window."""
    window = length if window is None else min(window, length)
    return window - window * window / (2 * length)


def balances_router(config: PretrainedConfig) -> bool:
    """Whether a mixture model's own load-balancing loss is trained beside the tokens."""
    return bool(config.get_text_config().to_dict().get("output_router_logits"))


class Balance(NamedTuple):
    """A mixture's own load-balancing loss, as its class reads it. loss: of `(router logits of each layer, experts,
    experts_of_token)`, a scalar; weight: that it counts by."""

    loss: Callable[..., torch.Tensor]
    experts: int
    experts_of_token: int
    weight: float


def find_balance(model: PreTrainedModel) -> Balance | None:
    """None where transformers has none for the model's class. Classes that take images too read their text's config."""
    loss = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")
    names = ("num_experts", "num_experts_per_tok", ROUTER_WEIGHT)
    for holder in (model, model.config.get_text_config()):
        if loss is not None and all(hasattr(holder, name) for name in names):
            return Balance(loss, *(getattr(holder, name) for name in names))
    return None


def with_router_loss(config: PretrainedConfig, coefficient: float | None) -> PretrainedConfig:
    """A copy in which a mixture's load-balancing loss has this weight and is trained, or is not where that is 0; None
    for what the config itself says. Raises UserError where the model has no such loss.

    Source of the two settings: https://huggingface.co/docs/transformers/model_doc/mixtral (MixtralConfig)
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if coefficient is None or (coefficient == 0 and ROUTER_WEIGHT not in text.to_dict()):
        return config
    if ROUTER_WEIGHT not in text.to_dict():
        why = "is no mixture of experts" if expert_share(config) == 1 else "has no such loss in transformers"
        raise UserError(
            f"there is no loss that balances routers to be weighed: {text.model_type} {why}",
            where=f"--router-aux-loss-coef {coefficient:g}",
            fix="leave it out",
        )
    text.router_aux_loss_coef, text.output_router_logits = coefficient, coefficient > 0
    return config


def check_trainable_architecture(config: PretrainedConfig) -> None:
    """Refuse by name what would be trained wrongly. Raises UserError."""
    if config.is_encoder_decoder:
        raise UserError(f"{config.model_type} is an encoder-decoder model", fix="swiftlite trains decoder-only models")
    if config.get_text_config().to_dict().get("layerdrop"):  # ranks would wait for each other's layers
        raise UserError(
            f"{config.model_type} leaves out whole layers at random", where="config.json", fix='set "layerdrop" to 0'
        )


# Methods, and formats of compressed-tensors, whose codes are read as numbers, see `swiftlite.checkpoint.codes`.
READABLE = {"fp8", "mxfp4", COMPRESSED_TENSORS, "bitsandbytes"}
READABLE_FORMATS = {
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp8-quantized", "naive-quantized",
    "pack-quantized",
}  # fmt: skip


def unread_codes(config: PretrainedConfig) -> str | None:
    """The method by which the files' numbers are codes, where nothing here reads these; None where it does, or where
    they are numbers."""
    section = codes_section(config.to_dict())
    method = section.get("quant_method")
    if not section:
        return None
    if not isinstance(method, str) or method not in READABLE:
        return str(method or "in a way that config.json does not name")[:100]
    if method != COMPRESSED_TENSORS:
        return None
    formats = {str(part["format"]) for part in (section, *schemes_of(section)) if part.get("format")}
    if strange := sorted(formats - READABLE_FORMATS):
        return f"{method}, {strange[0][:100]}"
    rotated = isinstance(rotations := section.get("transform_config"), dict) and rotations.get("config_groups")
    return f"{method}, whose layers rotate what enters them" if rotated else None


def check_plain_weights(config: PretrainedConfig, where: str, fix: str) -> None:
    """Refuse weights that are codes of a kind that nothing here reads (GPTQ, AWQ, NVFP4, ...): as they are, they are
    another model. Raises UserError. where, fix: of it."""
    if (method := unread_codes(config)) is not None:
        raise UserError(f"the model's weights are quantized ({method})", where=where, fix=fix)


def strange_layers(config: PretrainedConfig) -> list[str]:
    """The kinds of layers, as a config names them, that are not attention to all or the last tokens of a document."""
    return sorted(set(config.get_text_config().to_dict().get("layer_types") or []) - set(ATTENTION_KINDS))


def why_alone(model: PreTrainedModel) -> str | None:
    """Why documents of this model cannot lie end to end in one row, but need rows of their own; None where they
    can. model: on `meta` will do.
    """
    if strange := strange_layers(model.config):
        return f"layers of kind {', '.join(strange)}"
    for name, module in decoder_of(model).named_modules():
        if isinstance(module, nn.Conv1d):  # of a state space, which configs need not tell of
            return f"a convolution over tokens ({name})"
    if why := NOT_TOLD_OF_BORDERS.get(model.config.get_text_config().model_type):
        return why
    if not model._supports_attention_backend:
        return "attention that does not go through transformers' interface"
    return None
