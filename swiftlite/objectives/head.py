"""The output head on one chunk of tokens at a time: logits, what is read of them, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftlite.fused import can_fuse, fused
from swiftlite.models.kernels.embedding import gradient_of
from swiftlite.models.kernels.products import ROUND, ProductSum, product

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # logits of one chunk; a GPU needs larger ones to stay busy
SOFTMAX_ROWS = 32
CPU_CHUNK_TOKENS = 256  # enough for matrix products at full speed; the logits of a small vocabulary stay in the caches
GPU_TILE = 128  # tokens: of products' tiles, so that none is partly empty


def chunk_tokens(vocabulary: int, device: torch.device, itemsize: int = 4) -> int:
    """Tokens whose logits, of so many bytes each, fill one chunk."""
    count = max(16, CHUNK_BYTES.get(device.type, 512 << 20) // (itemsize * vocabulary))
    if device.type == "cpu":
        return min(count // ROUND * ROUND or count, CPU_CHUNK_TOKENS)
    return count // GPU_TILE * GPU_TILE or count


@dataclass(frozen=True)
class Soft:
    """Several targets of each token. shares: fp32 `[n, c]`, what each counts, 1 in all over the whole vocabulary; own:
    fp32 `[n]`, 1 where the first of them, the token of the text, is here."""

    shares: torch.Tensor
    own: torch.Tensor


@dataclass(frozen=True)
class Options:
    """chunk: tokens of one; dtype: of the products; tokens: without those that they are filled up with; leaf: the
    weight itself, where its gradient is added to its `.grad`: what autograd saves may come back as another tensor;
    soft: None where each token has one target; the rest as in `swiftlite.objectives.logprobs.token_logprobs`.

    Results have columns where there are several of a position: what counts, the target's own where that is another, and
    if they are judged the largest of the vocabulary, which `judge` compares with it.
    """

    scale: float
    softcap: float | None
    chunk: int
    dtype: torch.dtype
    tokens: int
    leaf: torch.Tensor | None
    upstream: torch.Tensor | None
    cast: torch.Tensor | None
    soft: Soft | None = None
    judged: bool = False

    @property
    def columns(self) -> int:
        return 1 + (self.soft is not None) + self.judged

    def without_filling(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Of the tokens alone. No view, which FSDP does not like a module to return."""
        return logprobs if len(logprobs) == self.tokens else logprobs[: self.tokens].clone()

    def results(self, hidden: torch.Tensor) -> torch.Tensor:
        """Where results go."""
        shape = (len(hidden),) if self.columns == 1 else (len(hidden), self.columns)
        return hidden.new_empty(shape, dtype=torch.float32)

    def beside(self, picked: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
        """Results of a chunk. picked: `[chunk]` or `[chunk, 2]`; largest: `[chunk]`, None where they are not judged."""
        if largest is None:
            return picked
        return torch.cat([picked.view(len(largest), -1), largest[:, None]], dim=1)

    def picked(self, results: torch.Tensor) -> torch.Tensor:
        """The columns of results that are of targets, a view `[n, 1 or 2]`."""
        return results[:, None] if results.dim() == 1 else results[:, : self.columns - self.judged]

    def judge(self, results: torch.Tensor) -> None:
        """In place, of a column of the largest one of whether a target is as large."""
        if self.judged:
            results[:, -1] = results[:, -2] >= results[:, -1]

    def of_means(self, upstream: torch.Tensor) -> torch.Tensor:
        """Gradients `[n]` of the results that have one."""
        return upstream if self.columns == 1 else upstream[:, 0]

    def parts(self, tokens: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, tokens, self.chunk)]


class Head:
    """The output head in the type of the products, and what a backward pass wants to know of it.

    Logits are fp32 and made again where they are needed again.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
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
        self._learns = any(needed)

    @staticmethod
    def logit_bytes(_dtype: torch.dtype) -> int:
        """Of one, where products are of a type."""
        return torch.float32.itemsize

    def read(self, part: slice, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(results of logits, normalizers), fp32, the latter `[chunk]`. rows: the targets' rows of the weight."""
        logits = self._logits(part)
        largest = logits.amax(-1) if self.options.judged else None
        return self.options.beside(self._picked(part, logits, rows), largest), logits.logsumexp(-1)

    def learn(self, part: slice, rows: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
        """Add the gradients of a chunk whose results all count, if any are wanted. Returns the results, fp32."""
        logits = self._logits(part)
        slope = self._slope(logits)
        largest = logits.new_empty(len(logits)) if self.options.judged else None
        logits = _log_softmax(logits, largest)
        logprobs = self.options.beside(self._picked(part, logits, rows), largest)
        self.options.judge(logprobs)
        if self._learns:
            self._take_gradients(part, logits, slope, rows, upstream, upstream)
        return logprobs

    def learn_again(
        self, part: slice, rows: torch.Tensor, upstream: torch.Tensor, found: torch.Tensor, normalizers: torch.Tensor
    ) -> None:
        """Add the gradients of a chunk that was read before. found: what the gradient of the target's own logit is
        multiplied by, upstream where it is one of these rows; all `[chunk]`."""
        logits = self._logits(part)
        slope = self._slope(logits)
        self._take_gradients(part, logits.sub_(normalizers[:, None]), slope, rows, upstream, found)

    def gradients(self) -> list[torch.Tensor | None]:
        """Of hidden, weight and bias, in their types; None for the weight's where that is direct."""
        weight = None if self.grad_weight is None or self.options.leaf is not None else self.grad_weight.total
        found = zip((self.grad_hidden, weight, self.grad_bias), self._types, strict=True)
        return [None if grad is None else grad.to(dtype) for grad, dtype in found]

    def likeliest(self, part: slice, count: int, within: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, rows of the weight) of the `count` likeliest of the first `within` rows, `[chunk, count]` each."""
        return self._logits(part)[:, :within].topk(count, -1)

    def _picked(self, _part: slice, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of `[chunk, vocabulary]` those of the targets."""
        return values.gather(-1, rows[:, None])[:, 0]

    def _add_found(self, _part: slice, grad: torch.Tensor, rows: torch.Tensor, found: torch.Tensor) -> None:
        """To the gradients `[chunk, vocabulary]` what they are at the targets beside the softmax's."""
        grad.scatter_add_(-1, rows[:, None], found[:, None].to(grad.dtype))

    def _raw_logits(self, part: slice) -> torch.Tensor:
        """In the type of the products."""
        logits = product(self._inputs(part), self._weight)
        return logits if self._bias is None else logits.add_(self._bias)

    def _inputs(self, part: slice) -> torch.Tensor:
        return self.hidden[part].to(self.options.dtype)

    def _add_products(self, part: slice, grad: torch.Tensor) -> None:
        """grad: of the raw logits, in the type of the products."""
        if self.grad_hidden is not None:
            self.grad_hidden[part] = product(grad, self._weight.T).to(self.hidden.dtype)
        if self.grad_weight is not None:
            self.grad_weight.add(grad, self._inputs(part))
        if self.grad_bias is not None:
            self.grad_bias += grad.sum(0)

    def _logits(self, part: slice) -> torch.Tensor:
        """fp32 `[chunk, vocabulary]`, transformed as the architecture does."""
        logits = self._raw_logits(part).float()
        if self.options.scale != 1.0:
            logits *= self.options.scale
        if self.options.softcap is not None:
            logits = logits.div_(self.options.softcap).tanh_().mul_(self.options.softcap)
        return logits

    def _slope(self, logits: torch.Tensor) -> torch.Tensor | None:
        """d softcapped / d raw logits, None where there is no soft cap."""
        softcap = self.options.softcap
        return None if softcap is None else 1 - (logits / softcap).square_()

    def _take_gradients(
        self,
        part: slice,
        logprobs: torch.Tensor,
        slope: torch.Tensor | None,
        rows: torch.Tensor,
        upstream: torch.Tensor,
        found: torch.Tensor,
    ) -> None:
        """d log p(y) / d logits = onehot(y) - p. logprobs: log p of the whole vocabulary, which is used up."""
        grad = logprobs.exp_().mul_(-upstream[:, None])
        self._add_found(part, grad, rows, found)
        if slope is not None:
            grad *= slope
        if self.options.scale != 1.0:
            grad *= self.options.scale
        self._add_products(part, grad.to(self.options.dtype))


class FusedHead(Head):
    """On a GPU: logits exist in the type of the products alone, are read twice and written once."""

    @staticmethod
    def logit_bytes(dtype: torch.dtype) -> int:
        return dtype.itemsize

    def read(self, part: slice, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked, normalizers, largest = self._read(self._raw_logits(part), rows)
        return self.options.beside(picked, largest), normalizers

    def learn(self, part: slice, rows: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
        logits = self._raw_logits(part)
        picked, normalizers, largest = self._read(logits, rows)
        if self._learns:
            self._take_over(part, logits, rows, upstream, upstream, normalizers)
        found = self.options.beside(picked, largest)
        self.options.judge(found)
        self.options.picked(found).sub_(normalizers[:, None])
        return found

    def _read(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        options = self.options
        return read_logits(logits, rows, options.scale, options.softcap, options.judged)

    def learn_again(
        self, part: slice, rows: torch.Tensor, upstream: torch.Tensor, found: torch.Tensor, normalizers: torch.Tensor
    ) -> None:
        self._take_over(part, self._raw_logits(part), rows, upstream, found, normalizers)

    def _take_over(self, part: slice, logits: torch.Tensor, *learnt: torch.Tensor) -> None:
        become_gradients(logits, *learnt, self.options.scale, self.options.softcap)
        self._add_products(part, logits)


class SoftHead(Head):
    """Several targets of each token, with shares. rows are `[chunk, c]`, and results `[chunk, 2]`: the sum over the
    targets by their shares, which has a gradient, and the first target's own, to be read alone."""

    def _picked(self, part: slice, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        soft = self.options.soft
        picked = values.gather(-1, rows)
        return torch.stack([(picked * soft.shares[part]).sum(-1), picked[:, 0] * soft.own[part]], dim=-1)

    def _add_found(self, part: slice, grad: torch.Tensor, rows: torch.Tensor, found: torch.Tensor) -> None:
        grad.scatter_add_(-1, rows, (found[:, None] * self.options.soft.shares[part]).to(grad.dtype))


def kind_of_head(hidden: torch.Tensor, soft: Soft | None = None) -> type[Head]:
    """The one for hidden states on their device."""
    if soft is not None:
        return SoftHead
    return FusedHead if hidden.is_cuda and can_fuse() else Head


@fused()  # the vocabulary is one number: a division by any number is slow
def read_logits(
    raw: torch.Tensor, rows: torch.Tensor, scale: float, softcap: float | None, judged: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(logits of the targets, normalizers, if they are judged the largest), fp32 `[chunk]` each, of raw logits
    `[chunk, vocabulary]`."""
    logits = _transformed(raw, scale, softcap)
    largest = logits.amax(-1) if judged else None
    return logits.gather(-1, rows[:, None])[:, 0], logits.logsumexp(-1), largest


@fused()
def become_gradients(
    raw: torch.Tensor,
    rows: torch.Tensor,
    upstream: torch.Tensor,
    found: torch.Tensor,
    normalizers: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    """Write into raw logits `[chunk, vocabulary]` their gradients. The others, `[chunk]`, as in `Head.learn_again`."""
    logits = _transformed(raw, scale, softcap)
    is_target = torch.arange(raw.shape[-1], device=raw.device) == rows[:, None]
    grad = torch.where(is_target, found[:, None], 0) - (logits - normalizers[:, None]).exp() * upstream[:, None]
    if softcap is not None:
        grad = grad * (1 - (logits / softcap).square())
    raw.copy_(grad * scale)


def _transformed(raw: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    logits = raw.float() * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _log_softmax(logits: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
    """On a CPU in place, with a copy of a few rows at a time. largest: becomes that of each row, `[chunk]`."""
    if logits.device.type != "cpu":
        logprobs = logits.log_softmax(-1)
        if largest is not None:
            torch.amax(logprobs, -1, out=largest)
        return logprobs
    for place, rows in enumerate(logits.split(SOFTMAX_ROWS)):
        found = rows.log_softmax(-1)
        if largest is not None:
            torch.amax(found, -1, out=largest[place * SOFTMAX_ROWS : (place + 1) * SOFTMAX_ROWS])
        rows.copy_(found)
    return logits
