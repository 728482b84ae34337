"""Token log-probabilities from hidden states, in chunks: the `[tokens, vocabulary]` logits never exist as a whole.

Every objective starts here. Only trained positions enter; each chunk's logits are made, reduced to one number a token
and dropped, and made again in the backward pass. The peak memory of the head is one chunk, whatever the number of
tokens and whatever the objective does with the log-probabilities afterwards. Where a loss is known to be a plain sum
over tokens, the gradients are taken while the logits are there, and nothing is made twice.

Under tensor parallelism each rank has some rows of the head and makes the logits of its tokens of the vocabulary only.
What the ranks exchange is two numbers a token in the forward pass and the gradient of the hidden states in the backward
pass, once for all chunks (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from swiftlite.dtensors import is_dtensor
from swiftlite.models.embedding import gradient_of, takes_gradient
from swiftlite.models.products import ROUND, ProductSum, onednn_serves, product, rounded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # fp32 logits of one chunk; a GPU needs larger ones to stay busy
SOFTMAX_ROWS = 32
CPU_CHUNK_TOKENS = 256  # enough for matrix products at full speed; the logits of a small vocabulary stay in the caches


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose fp32 logits fill one chunk."""
    count = max(16, CHUNK_BYTES.get(device.type, 512 << 20) // (4 * vocabulary))
    return min(count // ROUND * ROUND or count, CPU_CHUNK_TOKENS) if device.type == "cpu" else count


@dataclass(frozen=True)
class _Share:
    """This rank's tokens of a vocabulary that a group divides: `first` and the ones after it."""

    first: int
    group: dist.ProcessGroup

    def locate(self, targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether a target is here, its row here or 0)."""
        here = (targets >= self.first) & (targets < self.first + rows)
        return here, torch.where(here, targets - self.first, 0)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    summed: bool = False,
    direct: bool = False,
    upstream: torch.Tensor | None = None,
    cast: torch.Tensor | None = None,
) -> torch.Tensor:
    """log p(target) at each position, in fp32.

    hidden: `[n, hidden]`; weight: `[vocabulary, hidden]`; bias: `[vocabulary]` or None; targets: int64 `[n]`.
    Weight and bias may be DTensors on a 1-D mesh that divides the vocabulary, evenly or not; hidden states, targets and
    the result are the same on all its ranks, and so are the gradients of the hidden states.
    Logits are `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`. Under autocast the product runs in the
    autocast type; the logsumexp is always fp32. summed: promises that the loss is a multiple of their sum (each has the
    same gradient) and of one backward pass, which saves the second making of the logits where the vocabulary is whole.
    direct: the weight's gradient is added to its `.grad` where it is made, if that can be; autograd gets none. Of a sum
    that needs upstream: a number, the gradient that each result will get. cast: the weight in the autocast type, where
    there is such a copy.
    Returns `[n]`.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    share = None
    if is_dtensor(weight):
        share = _share_of(weight)
        weight, bias = weight.to_local(), None if bias is None else bias.to_local()
    chunk = chunk or chunk_tokens(weight.shape[0], hidden.device)
    at_once = summed and share is None and torch.is_grad_enabled()
    direct = direct and share is None and takes_gradient(weight) and not (at_once and upstream is None)
    tokens = len(targets)
    if onednn_serves(hidden.device, dtype):  # filled up here once, not in each product
        more = rounded(tokens) - tokens
        hidden, targets = F.pad(hidden, (0, 0, 0, more)), F.pad(targets, (0, more))
    options = _Options(scale, softcap, chunk, dtype, tokens, weight if direct else None, upstream, cast)
    if at_once:
        return _SummedLogProbs.apply(hidden, weight, bias, targets, options)
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, options, share)


def _share_of(weight: DTensor) -> _Share:
    mesh = weight.device_mesh
    [placement] = weight.placements
    assert placement.is_shard(0), f"a head placed {placement}"
    rows = -(-weight.shape[0] // mesh.size())  # by the rule of torch.chunk, as Shard divides
    return _Share(mesh.get_local_rank() * rows, mesh.get_group())


@dataclass(frozen=True)
class _Options:
    """dtype: of the products; tokens: without those that they are filled up with; leaf: the weight itself, where its
    gradient is added to its `.grad`: what autograd saves may come back as another tensor; the rest as in
    `token_logprobs`."""

    scale: float
    softcap: float | None
    chunk: int
    dtype: torch.dtype
    tokens: int
    leaf: torch.Tensor | None
    upstream: torch.Tensor | None
    cast: torch.Tensor | None

    def without_filling(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Of the tokens alone. No view, which FSDP does not like a module to return."""
        return logprobs if len(logprobs) == self.tokens else logprobs[: self.tokens].clone()

    def parts(self, tokens: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, tokens, self.chunk)]


class _Head:
    """The output head in the type of the products, and what a backward pass wants to know of it."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: _Options,
        needed: tuple[bool, ...] = (False, False, False),
    ) -> None:
        """needed: whether hidden, weight and bias want a gradient."""
        self.hidden, self.options = hidden, options
        self._types = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        self._weight = weight.to(options.dtype) if options.cast is None else options.cast
        self._bias = None if bias is None else bias.to(options.dtype)
        self.grad_hidden = torch.empty_like(hidden) if needed[0] else None
        total = gradient_of(options.leaf) if needed[1] and options.leaf is not None else None
        self.grad_weight = ProductSum(weight, options.dtype, total) if needed[1] else None
        self.grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None

    def logits(self, part: slice) -> torch.Tensor:
        """fp32 `[chunk, vocabulary]`, transformed as the architecture does."""
        logits = self._raw_logits(part)
        if self.options.scale != 1.0:
            logits *= self.options.scale
        if self.options.softcap is not None:
            logits = logits.div_(self.options.softcap).tanh_().mul_(self.options.softcap)
        return logits

    def _raw_logits(self, part: slice) -> torch.Tensor:
        logits = product(self._inputs(part), self._weight)
        return (logits if self._bias is None else logits.add_(self._bias)).float()

    def slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """d softcapped / d raw logits, None where there is no soft cap."""
        softcap = self.options.softcap
        return None if softcap is None else 1 - (logits / softcap).square_()

    def _inputs(self, part: slice) -> torch.Tensor:
        return self.hidden[part].to(self.options.dtype)

    def take_gradients(
        self,
        part: slice,
        logprobs: torch.Tensor,
        slope: torch.Tensor | None,
        rows: torch.Tensor,
        upstream: torch.Tensor,
        found: torch.Tensor,
    ) -> None:
        """Add a chunk's gradients. d log p(y) / d logits = onehot(y) - p.

        logprobs: log p of the whole vocabulary, which is used up; slope: of the chunk's logits; rows, found: of its
        tokens; found: what the gradient of the target's own logit is multiplied by, upstream where it is one of these
        rows.
        """
        grad = logprobs.exp_().mul_(-upstream)
        grad.scatter_add_(-1, rows[:, None], found[:, None].to(grad.dtype))
        if slope is not None:
            grad *= slope
        if self.options.scale != 1.0:
            grad *= self.options.scale
        grad = grad.to(self.options.dtype)
        if self.grad_hidden is not None:
            self.grad_hidden[part] = product(grad, self._weight.T).to(self.hidden.dtype)
        if self.grad_weight is not None:
            self.grad_weight.add(grad, self._inputs(part))
        if self.grad_bias is not None:
            self.grad_bias += grad.sum(0)

    def gradients(self) -> list[torch.Tensor | None]:
        """Of hidden, weight and bias, in their types; None for the weight's where that is direct."""
        weight = None if self.grad_weight is None or self.options.leaf is not None else self.grad_weight.total
        found = zip((self.grad_hidden, weight, self.grad_bias), self._types, strict=True)
        return [None if grad is None else grad.to(dtype) for grad, dtype in found]


class _ChunkedLogProbs(torch.autograd.Function):
    """Takes the gradients in the backward pass, when what the loss makes of each token is known."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, options, share):  # noqa: ANN001, ANN205
        head = _Head(hidden, weight, bias, options)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        here, rows = (None, targets) if share is None else share.locate(targets, weight.shape[0])
        for part in options.parts(hidden.shape[0]):
            logits = head.logits(part)
            normalizers[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, rows[part, None])[:, 0]
        if share is not None:
            _complete(logprobs, normalizers, here, share.group)
        logprobs -= normalizers
        ctx.save_for_backward(hidden, weight, bias, rows, here, normalizers)
        ctx.options, ctx.share = options, share
        return options.without_filling(logprobs)

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        hidden, weight, bias, rows, here, normalizers = ctx.saved_tensors
        upstream = F.pad(upstream, (0, len(hidden) - len(upstream)))
        head = _Head(hidden, weight, bias, ctx.options, ctx.needs_input_grad)
        found = upstream if here is None else upstream * here
        for part in ctx.options.parts(hidden.shape[0]):
            logits = head.logits(part)
            slope = head.slope(logits)
            head.take_gradients(
                part, logits.sub_(normalizers[part, None]), slope, rows[part], upstream[part, None], found[part]
            )
        if head.grad_hidden is not None and ctx.share is not None:
            dist.all_reduce(head.grad_hidden, group=ctx.share.group)
        return *head.gradients(), None, None, None


class _SummedLogProbs(torch.autograd.Function):
    """Takes the gradients of the sum in the forward pass; the backward pass scales them, where it was not known how."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, options):  # noqa: ANN001, ANN205
        head = _Head(hidden, weight, bias, options, ctx.needs_input_grad)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        upstream = logprobs.new_ones(()) if options.upstream is None else options.upstream
        upstream = F.pad(upstream.expand(options.tokens), (0, len(hidden) - options.tokens))[:, None]
        for part in options.parts(hidden.shape[0]):
            logits = head.logits(part)
            slope = head.slope(logits)
            logits = _log_softmax(logits)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0]
            if any(ctx.needs_input_grad):
                head.take_gradients(part, logits, slope, targets[part], upstream[part], upstream[part, 0])
            del logits, slope  # before the next chunk's, and before the gradients are laid out
        ctx.gradients, ctx.upstream = head.gradients(), options.upstream
        return options.without_filling(logprobs)

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so there is no second time
        if upstream.numel():
            expected = upstream[0] if ctx.upstream is None else ctx.upstream
            torch._assert_async((upstream == expected).all(), "the loss is no multiple of the sum")
            if ctx.upstream is None:
                gradients = [None if grad is None else grad.mul_(expected) for grad in gradients]
        return *gradients, None, None


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """On a CPU in place, with a copy of a few rows at a time."""
    if logits.device.type != "cpu":
        return logits.log_softmax(-1)
    for rows in logits.split(SOFTMAX_ROWS):
        rows.copy_(rows.log_softmax(-1))
    return logits


def _complete(logits: torch.Tensor, normalizers: torch.Tensor, here: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make one rank's logits of the targets and normalizers, `[n]` each, those of the whole vocabulary, in place."""
    largest = normalizers.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizers - largest).exp_(), logits.masked_fill_(~here, 0)])
    dist.all_reduce(sums, group=group)
    normalizers.copy_(sums[0].log_().add_(largest))
    logits.copy_(sums[1])
