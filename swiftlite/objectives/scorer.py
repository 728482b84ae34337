"""A Hugging Face model as every objective sees it: micro-batch in, log-probability of each trained token out."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from swiftlite.errors import UserError, kind_and_words
from swiftlite.models.anatomy import balances_router, dissect, find_balance
from swiftlite.models.attention.documents import Windows, noted_windows
from swiftlite.models.kernels.half_products import half_weight
from swiftlite.models.kernels.last_layer import PLACES
from swiftlite.models.logits import unknown_transform
from swiftlite.models.noise import EmbeddingNoise
from swiftlite.objectives.completions import answer_scores
from swiftlite.objectives.inputs import Probe, decoder_inputs, documents_of, make_probe, one_document, side_by_side
from swiftlite.objectives.logprobs import likeliest_tokens, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import ModelOutput, MoeModelOutputWithPast

    from swiftlite.data.batches import MicroBatch

# Of the largest number, for what the numbers' type rounds: 2^-13 of fp32, so that little of another document shows; at
# most 0.02, of 16-bit types.
ROUNDINGS, MOST = 1024, 2e-2

# What a device or another process may raise on the way, which says nothing about an architecture.
OF_THE_MACHINE = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)


class Scores(NamedTuple):
    """logprobs: fp32 `[trained tokens]`; router_loss: the load-balancing loss of a mixture model, or None.

    A tuple, so that FSDP finds the tensors whose backward it has to prepare for.
    """

    logprobs: torch.Tensor
    router_loss: torch.Tensor | None


class TokenScorer(nn.Module):
    """Runs the model's own decoder, then the chunked head at the trained positions only.

    A sequence classifier's head runs at the last token of each answer: its `logprobs` are the answers' scores.
    """

    def __init__(
        self,
        model: nn.Module,
        base: PreTrainedModel,
        *,
        summed: bool = False,
        direct: bool = False,
        alone: bool = False,
    ) -> None:
        """model: what is trained and saved (with adapters or not); base: the causal language model inside it.

        summed: the loss is a multiple of the sum of all log-probabilities; direct: nothing takes notice of gradients on
        their way; see `token_logprobs`. alone: the decoder gets each document as a row, and borders are not spoken of.
        """
        super().__init__()
        self._summed, self._direct, self._alone = summed, direct, alone
        self.wants_upstream = summed
        self.model = model
        self._base = [base]  # in a list, so that its parameters are not registered a second time
        self._anatomy = dissect(base)
        self._noise = EmbeddingNoise(0.0)
        self._tells: dict[str, int] | None = None
        self._judges = False
        self._temperature = 1.0
        self._routed = balances_router(base.config) and not self._anatomy.gives_scores
        self._balance = find_balance(base) if self._routed else None
        if self._routed and self._balance is None:
            raise UserError(
                f"{type(base).__name__} has no load-balancing loss that is known here, but its config asks for one",
                where="config.json",
                fix='set "output_router_logits" to false, and leave --router-aux-loss-coef out',
            )

    @property
    def base(self) -> PreTrainedModel:
        return self._base[0]

    def add_noise(self, alpha: float) -> None:
        """From now on the embeddings of micro-batches that say so get noise, once the model is divided."""
        self._noise = EmbeddingNoise(alpha)
        self._noise.attach(self._anatomy.embedding)

    def tell_likeliest(self, count: int, within: int) -> None:
        """From now on it is asked for the likeliest tokens: `logprobs` is fp32 `[2, trained tokens, count]`, their
        probabilities and their ids, which fp32 holds exactly up to 2^24. within: see `likeliest_tokens`."""
        self._tells = {"count": count, "within": within}

    def judge(self) -> None:
        """From now on `logprobs` has a last column: whether a trained token is the likeliest, see `token_logprobs`."""
        self._judges = True

    def shape_of(self, batch: MicroBatch) -> tuple[int, ...]:
        """That `logprobs` of a micro-batch has."""
        columns = 1 + (batch.taught is not None) + self._judges
        return (len(batch.learnt),) if columns == 1 else (len(batch.learnt), columns)

    def temper(self, temperature: float) -> None:
        """From now on probabilities are those of logits divided by a temperature."""
        self._temperature = temperature

    def forward(self, batch: MicroBatch, upstream: torch.Tensor | None = None) -> Scores:
        """Score one micro-batch. upstream: see `token_logprobs`. Raises UserError where the model ignores the document
        borders."""
        outputs = self._decode(batch)
        logprobs = self._score(outputs.last_hidden_state, batch, upstream)
        return Scores(logprobs, self._router_loss(outputs, batch) if self._routed else None)

    def _decode(self, batch: MicroBatch | Probe, hidden: torch.Tensor | None = None) -> ModelOutput | _Decoded:
        """The decoder's outputs. hidden: `[1, T, hidden]`, what enters its layers instead of the tokens' embeddings."""
        options: dict[str, object] = {"output_router_logits": True} if self._routed else {}
        if self._alone:
            return self._decode_side_by_side(batch, options)
        if not self._anatomy.gives_scores:
            options[PLACES] = batch.learnt
        with self._noise.of(None if batch.noise is None else batch.noise[:, None]):
            return self._anatomy.decoder(**self._inputs(batch, hidden), **options)

    def _decode_side_by_side(self, batch: MicroBatch | Probe, options: dict[str, object]) -> _Decoded:
        """Each document in a row of its own, answers behind the prompt that they share. Rows are filled up behind their
        last tokens, which see nothing of it."""
        documents = documents_of(batch)
        runs = [document.input_ids[0] for document in documents if document.is_run]
        rows = pad_sequence(runs, batch_first=True)
        with self._noise.of(None if batch.noise is None else side_by_side(batch.noise, runs)):
            decoded = self._anatomy.decoder(input_ids=rows, use_cache=False, **options)
        states = iter(decoded.last_hidden_state)
        unread = decoded.last_hidden_state.new_zeros(1, decoded.last_hidden_state.shape[-1])
        own = [
            next(states)[document.input_ids.shape[1] - document.tokens : document.input_ids.shape[1]]
            if document.is_run
            else unread.expand(document.tokens, -1)
            for document in documents
        ]
        real = torch.cat([torch.arange(len(run)) + place * rows.shape[1] for place, run in enumerate(runs)])
        routed = decoded.router_logits if self._routed else ()
        return _Decoded(torch.cat(own)[None], tuple(each[real.to(each.device)] for each in routed))

    def tokens_of_pass(self, batch: MicroBatch) -> int:
        """How many go through the model: those of a micro-batch, and what fills rows up."""
        if not self._alone:
            return batch.input_ids.shape[1]
        runs = [document.input_ids.shape[1] for document in documents_of(batch) if document.is_run]
        return len(runs) * max(runs)

    def _inputs(self, batch: MicroBatch | Probe, hidden: torch.Tensor | None) -> dict[str, object]:
        return one_document(batch) if self._alone else decoder_inputs(batch, hidden)

    def _score(
        self, hidden: torch.Tensor, batch: MicroBatch | Probe, upstream: torch.Tensor | None = None
    ) -> torch.Tensor:
        """log p of the trained tokens from the decoder's last hidden states `[1, T, hidden]`; of a classifier scores of
        answers, of a teacher what it tells."""
        if self._anatomy.gives_scores:
            last = batch.completions.last if batch.context is None else batch.context.in_slice(batch.completions.last)
            return answer_scores(hidden[0], self._anatomy.head.weight, last)
        head, transform = self._anatomy.head, self._anatomy.transform
        at_learnt = hidden[0].index_select(0, batch.learnt), head.weight, head.bias
        scale, softcap = (part and part / self._temperature for part in (transform.scale, transform.softcap))
        options = {"scale": scale, "softcap": softcap, "cast": half_weight(head)}
        if self._tells is not None:
            probabilities, ids = likeliest_tokens(*at_learnt, **self._tells, **options)
            return torch.stack([probabilities, ids.to(probabilities.dtype)])
        targets, shares = batch.labels[0].index_select(0, batch.learnt), None
        if batch.taught is not None:
            targets, shares = batch.taught.beside(targets)
        return token_logprobs(
            *at_learnt,
            targets,
            summed=self._summed,
            direct=self._direct,
            upstream=upstream,
            shares=shares,
            judged=self._judges,
            **options,
        )

    def _router_loss(self, outputs: MoeModelOutputWithPast | _Decoded, batch: MicroBatch) -> torch.Tensor:
        """The architecture's own load-balancing loss times its own coefficient (a mean over the micro-batch).

        Of a divided row each rank gives an equal part of the whole row's loss.
        """
        balance = self._balance
        logits = outputs.router_logits
        if batch.context is not None:
            logits = tuple(batch.context.whole_row(layer) for layer in logits)
        loss = balance.loss(logits, balance.experts, balance.experts_of_token)
        if batch.context is not None:
            loss = loss / batch.context.size
        return balance.weight * loss.to(outputs.last_hidden_state.device)

    @torch.no_grad()
    def check(self, longest: float = inf, device: torch.device | None = None) -> None:
        """Run a few tokens in two documents, or one alone, before a step is trained. longest: tokens of any document;
        device: where the model runs, if that is not where its parameters are kept.

        Raises UserError for an architecture whose attention does not keep documents apart, for one whose output head
        does more than swiftlite knows of, by comparison with the model's own logits, and for one that cannot run so.
        """
        try:
            with noted_windows() as windows:
                was_training = self.training
                self.eval()
                run = self._check_alone if self._alone else self._check
                run(device or next(self.parameters()).device)
                self.train(was_training)
        except OF_THE_MACHINE:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{type(self.base).__name__} cannot run {'a document' if self._alone else 'packed documents'}: "
                f"{kind_and_words(error)}",
                fix="use another model, or --tensor-parallel-size 1 where that was higher, or report the architecture",
            ) from error
        if not self._alone:
            self._check_windows(windows, longest)

    def _check_alone(self, device: torch.device) -> None:
        probe = make_probe(self.base.config.get_text_config().vocab_size, device)
        document = probe.second()
        if self._anatomy.gives_scores:
            hidden = self._decode(document).last_hidden_state
        else:
            hidden, own = self._with_own_logits(document, None)
            self._check_head(hidden, own, document)
        self._check_documents(self._decode(probe).last_hidden_state, hidden)
        beginning = self._decode(document.first(3)).last_hidden_state
        if (beginning - hidden[:, :3]).abs().max() > _tolerance(hidden) * hidden.abs().max():
            raise UserError(f"{type(self.base).__name__} lets a token see later ones", fix="use a decoder-only model")

    def _check(self, device: torch.device) -> None:
        probe, entering = make_probe(self.base.config.get_text_config().vocab_size, device), self._probe_hidden(device)
        alone = self._decode(probe.second(), None if entering is None else entering[:, 3:]).last_hidden_state
        if self._has_head and not self._anatomy.gives_scores:
            hidden, own = self._with_own_logits(probe, entering)
            self._check_head(hidden, own, probe)
        else:
            hidden = self._decode(probe, entering).last_hidden_state
        self._check_documents(hidden, alone)

    def _with_own_logits(self, probe: Probe, entering: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the decoder's last hidden states, the model's own logits `[8, vocabulary]`) of one pass."""
        seen: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: object, output: ModelOutput) -> None:
            seen.append(output.last_hidden_state)

        handle = self._anatomy.decoder.register_forward_hook(keep)
        try:
            logits = self.base(**self._inputs(probe, entering)).logits[0]
        finally:
            handle.remove()
        return seen[0], logits.float().to(seen[0].device)

    @property
    def _has_head(self) -> bool:
        return True

    def _probe_hidden(self, device: torch.device) -> torch.Tensor | None:
        """Hidden states for `check`, `[1, 8, hidden]`, where no tokens enter."""
        return None

    def _check_documents(self, hidden: torch.Tensor, alone: torch.Tensor) -> None:
        if (alone - hidden[:, 3:]).abs().max() > _tolerance(hidden) * hidden.abs().max():
            raise UserError(
                f"{type(self.base).__name__} lets one packed document see another",
                fix="use another model, or report the architecture",
            )

    def _check_windows(self, windows: Windows, longest: float) -> None:
        kinds = self.base.config.get_text_config().to_dict().get("layer_types")
        if kinds and "sliding_attention" not in kinds:  # a stage of a pipeline with layers of the other kind only
            return
        lost = min(windows.asked - windows.given, default=inf)
        if lost < longest:
            raise UserError(
                f"{type(self.base).__name__} does not tell its attention of the sliding window of {lost} tokens",
                where="--max-length",
                fix=f"use --max-length {lost}, or another model",
            )

    def _check_head(self, hidden: torch.Tensor, own: torch.Tensor, probe: Probe) -> None:
        targets = own.argmax(-1)
        theirs = own.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        ours = self._score(hidden, replace(probe, labels=targets[None]))
        if not torch.isfinite(theirs).all():
            raise UserError(
                f"{type(self.base).__name__} makes numbers that are not finite of its weights",
                fix="check the weights: they hold NaN or infinity, or overflow in --precision fp16",
            )
        near = max(_tolerance(hidden), ROUNDINGS * torch.finfo(ours.dtype).eps)
        if not torch.allclose(ours, theirs, rtol=near, atol=near):
            raise unknown_transform(self.base)


def _tolerance(hidden: torch.Tensor) -> float:
    """Of the type in which products were made: under autocast hidden states may be fp32 all the same."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return min(MOST, ROUNDINGS * torch.finfo(dtype).eps)


class _Decoded(NamedTuple):
    """What is read of a decoder's outputs. last_hidden_state: `[1, T, hidden]`; router_logits: of each layer `[tokens,
    experts]`, those of a prompt once for each answer."""

    last_hidden_state: torch.Tensor
    router_logits: tuple[torch.Tensor, ...]
