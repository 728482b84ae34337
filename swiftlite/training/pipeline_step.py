"""One global step through the stages of a pipeline.

PyTorch's schedules (https://docs.pytorch.org/docs/stable/distributed.pipelining.html) move hidden states forwards and
their gradients backwards. They want all micro-batches of a step in one shape, so each is padded to one number of tokens
by documents of its own that nothing is learnt from. Token ids, borders and labels do not travel: every rank of a
pipeline has the step's micro-batches, and each stage takes them in order, as all schedules run them.

The shapes that stages exchange are told to PyTorch, not inferred from a first micro-batch. Inference would run that
micro-batch twice in each new shape, throw away gradients that FSDP has gathered, and exchange pickled descriptions; and
a new shape in an old schedule would be received into old buffers without an error, so a schedule is built for each.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from swiftlite.data.batches import IGNORED, MicroBatch
from swiftlite.errors import SwiftliteError, UserError
from swiftlite.models.anatomy import dissect
from swiftlite.objectives.logprobs import token_logprobs
from swiftlite.objectives.supervised import supervised_loss
from swiftlite.parallel.context import Context, slice_for_context
from swiftlite.parallel.mesh import Mesh
from swiftlite.parallel.pipeline import Pipeline, Stage
from swiftlite.training.precision import Precision
from swiftlite.training.step import StepOutcome, derive_seed

ROUND_TO = 64  # tokens of a micro-batch: few shapes, so that a schedule is seldom built again


@dataclass(frozen=True)
class Work:
    """What the stages go through, in order. around: entered for the forward pass of micro-batch i of a stage."""

    batches: Sequence[MicroBatch]
    around: Callable[[int, int], AbstractContextManager[None]]


class StageScorer(nn.Module):
    """A stage as a schedule sees it: hidden states in, hidden states out; log-probabilities out of the last.

    The first takes nothing, since it makes its hidden states from the micro-batch's tokens. With a mixture model the
    routers' counts travel along, since its loss is not a sum over layers.
    """

    def __init__(self, stage: Stage, hidden_dtype: torch.dtype) -> None:
        """hidden_dtype: of hidden states between layers, the type of the embedding's output."""
        super().__init__()
        self.model = stage.model
        self.stage = stage
        self._anatomy = dissect(stage.base)
        self._dtype = hidden_dtype
        self._routing = Routing(stage.base) if _is_routed(stage.base) else None
        self._work: Work | None = None
        self._next = 0

    def begin(self, work: Work) -> None:
        """Take on the micro-batches that the following calls are about."""
        self._work, self._next = work, 0

    def border(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Examples of what crosses a border between stages, without memory: of `tokens` tokens."""
        width = self.stage.base.config.get_text_config().hidden_size
        hidden = torch.empty(1, tokens, width, dtype=self._dtype, device="meta", requires_grad=True)
        return (hidden,) if self._routing is None else (hidden, self._routing.start(torch.device("meta")))

    def forward(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """received: `[1, T, hidden]`, and `[2, experts]` of a mixture model; nothing on the first stage.

        Returns the same, or from the last stage fp32 `[trained tokens]` and the router loss of a mixture model.
        """
        index, self._next = self._next, self._next + 1
        batch = self._work.batches[index]
        with self._work.around(self.stage.index, index):
            outputs = self._decode(batch, received)
            hidden = outputs.last_hidden_state
            routed: tuple[torch.Tensor, ...] = ()
            if self._routing is not None:
                so_far = self._routing.start(hidden.device) if self.stage.is_first else received[1]
                routed = (self._routing.add(so_far, outputs.router_logits, batch),)
            if self.stage.is_last:
                loss = tuple(self._routing.loss(counts, batch) for counts in routed)
                return (self._score(hidden, batch), *loss)
            return tuple(_wanting_grad(x) for x in (hidden.to(self._dtype), *routed))

    def _decode(self, batch: MicroBatch, received: tuple[torch.Tensor, ...]):  # noqa: ANN202 - the architecture's class
        options = {} if self._routing is None else {"output_router_logits": True}
        entering = {"input_ids": batch.input_ids} if self.stage.is_first else {"inputs_embeds": received[0]}
        return self._anatomy.decoder(
            **entering,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seqlens,
            cu_seq_lens_k=batch.cu_seqlens,
            max_length_q=batch.max_document,
            max_length_k=batch.max_document,
            context=batch.context,
            **options,
        )

    def _score(self, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        trained = batch.labels[0] != IGNORED
        head, transform = self._anatomy.head, self._anatomy.transform
        return token_logprobs(
            hidden[0][trained],
            head.weight,
            head.bias,
            batch.labels[0][trained],
            scale=transform.scale,
            softcap=transform.softcap,
        )


def _wanting_grad(x: torch.Tensor) -> torch.Tensor:
    """The next stage sends a gradient in any case, also to a stage that is frozen and has no use for it."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_(True)


def _is_routed(base: nn.Module) -> bool:
    return bool(base.config.get_text_config().to_dict().get("output_router_logits"))


class Routing:
    """The load-balancing loss of a mixture model whose layers lie on several stages.

    `experts * sum over experts of f P`, f the tokens and P the router probability that an expert gets, both as means
    over tokens *and layers* (arXiv 2101.03961, equations 4 to 6). So it is no sum over stages: they hand on the sums
    of f and P, `[2, experts]`, and the last one makes the loss.
    """

    def __init__(self, base: nn.Module) -> None:
        """Raises UserError where the architecture's own loss is another."""
        self.experts, self.chosen, self._coefficient = (
            base.num_experts,
            base.num_experts_per_tok,
            base.router_aux_loss_coef,
        )
        own = vars(sys.modules[type(base).__module__])["load_balancing_loss_func"]
        layers = tuple(torch.randn(5, self.experts) for _ in range(2))
        ours = self._loss(self._counts(layers))
        if not torch.allclose(ours, own(layers, self.experts, self.chosen), rtol=1e-5):
            raise UserError(
                f"{type(base).__name__} has a load-balancing loss that cannot be divided over pipeline stages",
                where="--pipeline-parallel-size",
                fix="use --pipeline-parallel-size 1, or a model without output_router_logits",
            )

    def start(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(2, self.experts, device=device, requires_grad=torch.is_grad_enabled())

    def add(
        self, so_far: torch.Tensor, layers: tuple[torch.Tensor, ...] | None, batch: MicroBatch
    ) -> torch.Tensor:
        """`so_far` and the counts of a stage's layers. layers: router logits `[T, experts]` each; padding is left out."""
        if not layers or not batch.tokens:
            return so_far
        if batch.context is not None:
            layers = tuple(batch.context.whole_row(layer) for layer in layers)
        else:
            layers = tuple(layer[: batch.tokens] for layer in layers)
        return so_far + self._counts(layers)

    def loss(self, counts: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """This rank's part of the micro-batch's loss: of a row divided over context ranks each gives an equal part."""
        share = 1 if batch.context is None else batch.context.size
        return self._coefficient * self._loss(counts) / share

    def _counts(self, layers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        probabilities = torch.cat([layer.softmax(-1) for layer in layers]).float()
        chosen = F.one_hot(probabilities.topk(self.chosen, dim=-1).indices, self.experts).sum((0, 1))
        return torch.stack([chosen.float(), probabilities.sum(0)])

    def _loss(self, counts: torch.Tensor) -> torch.Tensor:
        rows = (counts[0].sum() / self.chosen).clamp(min=1)
        return self.experts * (counts[0] * counts[1]).sum() / rows.square()
