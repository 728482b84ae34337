"""Which part every module of a model plays under tensor parallelism, and which sizes a model can be split into.

The parts come from the plan that transformers keeps with each architecture (`config.base_model_tp_plan`), read as data;
the vocabulary (embedding and head) and mixtures of experts are divided by rules of our own.
Sources: Megatron-LM (arXiv 1909.08053);
https://huggingface.co/docs/transformers/main/en/perf_train_gpu_many#tensor-parallelism
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any

from swiftlite.errors import UserError
from swiftlite.models.anatomy import EXPERTS, attention_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Part(Enum):
    """What a module does with a whole or divided activation."""

    COLUMN = "whole in, its own output features out"
    COLUMN_GATHERED = "whole in, its own output features computed, whole out"
    ROW = "its own input features in, sums out"
    ROW_SPLIT = "whole in, of which it takes its own input features, sums out"
    SUMMED = "whole weights between column and row: each rank sees a part of their gradient"
    EXPERTS = "some of the experts of a mixture"
    HEAD_NORM = "a norm with its own weights for each head"
    LATENT = "whole weights whose rotary part goes to divided heads (multi-head latent attention)"


_PARTS = {
    "colwise": Part.COLUMN,
    "colwise_gather_output": Part.COLUMN_GATHERED,
    "rowwise": Part.ROW,
    "rowwise_split_input": Part.ROW_SPLIT,
    "replicated_with_grad_allreduce": Part.SUMMED,
    "moe_tp_experts": Part.EXPERTS,
    "mla_kv_a_proj": Part.LATENT,
}
_SILENT = ("local_params", "replicate")  # say nothing about placement: every module here runs on local tensors
# Architectures whose layers also do what their plan does not speak of, by the types that configs name.
_PLAN_LACKS = {"gemma3n_text": "hidden states are mixed by weights of its alternating updates"}
KEY_VALUE = ("k_proj", "v_proj")  # columns that may have fewer heads than there are ranks


class TensorPlan:
    """The parts of the modules below a decoder, by name."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self.parts = parts
        self._patterns = [(re.compile(re.escape(name).replace(r"\*", "[^.]+")), part) for name, part in parts.items()]

    def part(self, name: str) -> Part | None:
        """name: of a module or parameter below the decoder, such as `layers.3.mlp.up_proj`."""
        return next((part for pattern, part in self._patterns if pattern.fullmatch(name)), None)

    def has(self, *parts: Part, inside: str = "", outside: str | None = None) -> bool:
        """Whether a name with `inside` and without `outside` in it plays one of these parts."""
        return any(
            part in parts and inside in name and (outside is None or outside not in name)
            for name, part in self.parts.items()
        )


def tensor_plan(config: PretrainedConfig) -> TensorPlan:
    """The plan of an architecture. Raises UserError naming one that has none, or one that is not understood."""
    text = config.get_text_config()
    styles = text.base_model_tp_plan
    problem = None if styles else f"{text.model_type} has no tensor-parallel plan in transformers"
    if lacking := _PLAN_LACKS.get(text.model_type):
        problem = f"the tensor-parallel plan of {text.model_type} is not all that its layers do: {lacking}"
    if problem:
        fix = "use --tensor-parallel-size 1; data parallelism needs no plan"
        raise UserError(problem, where="--tensor-parallel-size", fix=fix)
    experts = [name for name, style in styles.items() if style == "moe_tp_experts"]
    inside = tuple(f"{name}." for name in experts)  # experts are dealt out whole, never cut
    divided = {name: style for name, style in styles.items() if name.startswith("layers.")}
    divided = {name: style for name, style in divided.items() if style not in _SILENT and not name.startswith(inside)}
    strange = sorted({style for style in divided.values() if style not in _PARTS})
    if strange:
        raise UserError(
            f"the tensor-parallel plan of {text.model_type} has parts of kind {', '.join(strange)}, "
            "which swiftlite does not know",
            where="--tensor-parallel-size",
            fix="use --tensor-parallel-size 1; data, pipeline and context parallelism do not need a plan",
        )
    return TensorPlan({name: _PARTS[style] for name, style in divided.items()})


def check_tensor_parallel(config: PretrainedConfig, size: int, *, compile_layers: bool = False) -> None:
    """Refuse a size that a model cannot be split into, naming the nearest smaller one that works. Needs no weights.

    Fewer key/value heads than ranks work where the ranks are a multiple of them: several ranks then use the same head.
    Raises UserError.
    """
    if size == 1:
        return
    plan = tensor_plan(config)
    text = config.get_text_config()
    problem = _misfit(text, plan, size)
    if problem is not None:
        nearest = next(n for n in range(size - 1, 0, -1) if _misfit(text, plan, n) is None)
        raise UserError(
            f"{text.model_type} cannot be split over {size} tensor-parallel ranks: {problem}",
            where=f"--tensor-parallel-size {size}",
            fix=f"use --tensor-parallel-size {nearest}",
        )
    if compile_layers:
        from swiftlite.parallel.tensor_borders import check_compiler

        check_compiler()


def _misfit(text: PretrainedConfig, plan: TensorPlan, size: int) -> str | None:
    """Why the model cannot be split into `size`, None where it can."""
    values = text.to_dict()
    heads = attention_heads(text)
    kv_heads = values.get("num_key_value_heads") or heads
    if plan.has(Part.COLUMN, inside="attn.") or plan.has(Part.COLUMN, inside="attention."):
        for count in _numbers(heads):
            if count % size:
                return f"its {count} attention heads do not divide by {size}"
        if any(plan.has(Part.COLUMN, inside=f".{name}") for name in KEY_VALUE):
            for count in _numbers(kv_heads):
                if not kv_heads_fit(count, size):
                    return f"{size} is neither a divisor nor a multiple of its {count} key/value heads"
    count = next((values[name] for name in EXPERTS if values.get(name)), 0)
    if plan.has(Part.EXPERTS) and count:  # a plan may be for dense models of the architecture as well
        if count % size:
            return f"its {count} experts do not divide by {size}"
    elif plan.has(Part.COLUMN, Part.COLUMN_GATHERED, inside="layers", outside="attn"):
        for width in _numbers(values.get("intermediate_size")):
            if width % size:
                return f"its feed-forward width {width} does not divide by {size}"
    if (size - 1) * -(-text.vocab_size // size) >= text.vocab_size:
        return f"its {text.vocab_size} tokens leave a rank without any"
    return None


def kv_heads_fit(heads: int, size: int) -> bool:
    """Whether each rank can have whole key/value heads, its own or one that it shares."""
    return heads % size == 0 or size % heads == 0


def _numbers(value: Any) -> list[int]:
    """A config's number, or its numbers layer by layer."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
