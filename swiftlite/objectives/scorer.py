"""A Hugging Face model as every objective sees it: micro-batch in, log-probability of each trained token out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from swiftlite.errors import UserError
from swiftlite.models.anatomy import dissect
from swiftlite.objectives.logprobs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swiftlite.data.batches import MicroBatch

HEAD_TOLERANCE = 2e-2  # of the largest logit; a forgotten scale or soft cap is off by far more than bf16 rounding


class Scores(NamedTuple):
    """logprobs: fp32 `[trained tokens]`; router_loss: the load-balancing loss of a mixture model, or None.

    A tuple, so that FSDP finds the tensors whose backward it has to prepare for.
    """

    logprobs: torch.Tensor
    router_loss: torch.Tensor | None


class TokenScorer(nn.Module):
    """Runs the model's own decoder, then the chunked head at the trained positions only."""

    def __init__(self, model: nn.Module, base: PreTrainedModel) -> None:
        """model: what is trained and saved (with adapters or not); base: the causal language model inside it."""
        super().__init__()
        self.model = model
        self._base = [base]  # in a list, so that its parameters are not registered a second time
        self._anatomy = dissect(base)
        self._routed = bool(base.config.get_text_config().to_dict().get("output_router_logits"))

    @property
    def base(self) -> PreTrainedModel:
        return self._base[0]

    def forward(self, batch: MicroBatch) -> Scores:
        """Score one micro-batch. Raises UserError where the model ignores the document borders."""
        outputs = self._decode(batch)
        trained = batch.labels[0] != -100
        hidden = outputs.last_hidden_state[0][trained]
        head, transform = self._anatomy.head, self._anatomy.transform
        logprobs = token_logprobs(
            hidden,
            head.weight,
            head.bias,
            batch.labels[0][trained],
            scale=transform.scale,
            softcap=transform.softcap,
        )
        return Scores(logprobs, self._router_loss(outputs, batch) if self._routed else None)

    def _decode(self, batch: MicroBatch):  # noqa: ANN202 - the output class is the architecture's own
        options = {"output_router_logits": True} if self._routed else {}
        return self._anatomy.decoder(
            input_ids=batch.input_ids,
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

    def _router_loss(self, outputs, batch: MicroBatch) -> torch.Tensor:  # noqa: ANN001
        """The architecture's own load-balancing loss times its own coefficient (a mean over the micro-batch).

        Of a divided row each rank gives an equal part of the whole row's loss.
        """
        balance = vars(sys.modules[type(self.base).__module__])["load_balancing_loss_func"]
        logits = outputs.router_logits
        if batch.context is not None:
            logits = tuple(batch.context.whole_row(layer) for layer in logits)
        loss = balance(logits, self.base.num_experts, self.base.num_experts_per_tok)
        if batch.context is not None:
            loss = loss / batch.context.size
        return self.base.router_aux_loss_coef * loss.to(outputs.last_hidden_state.device)

    @torch.no_grad()
    def check(self) -> None:
        """Compare with the model's own logits on a few tokens. Raises UserError where they differ.

        This is what finds an architecture whose output head does more than swiftlite knows of, and one whose
        attention does not keep documents apart, before a step is trained.
        """
        was_training = self.training
        self.eval()
        device = self._anatomy.head.weight.device
        ids = (torch.arange(8, device=device) * 7 + 3).remainder(self._anatomy.head.weight.shape[0])[None]
        probe = _Probe(ids, torch.tensor([0, 3, 8], dtype=torch.int32, device=device))
        hidden = self._decode(probe).last_hidden_state[0]
        own = self._own_logits(hidden, probe)
        head, transform = self._anatomy.head, self._anatomy.transform
        rows = torch.arange(8, device=device)
        targets = own.argmax(-1)
        ours = token_logprobs(hidden, head.weight, head.bias, targets, scale=transform.scale, softcap=transform.softcap)
        theirs = own.log_softmax(-1)[rows, targets]
        alone = self._decode(_Probe(ids[:, 3:], torch.tensor([0, 5], dtype=torch.int32, device=device)))
        self.train(was_training)
        name = type(self.base).__name__
        if not torch.allclose(ours, theirs, rtol=HEAD_TOLERANCE, atol=HEAD_TOLERANCE):
            raise UserError(
                f"{name} turns hidden states into logits in a way swiftlite does not know",
                fix="use another model, or report the architecture",
            )
        scale = hidden.abs().max()
        if (alone.last_hidden_state[0] - hidden[3:]).abs().max() > HEAD_TOLERANCE * scale:
            raise UserError(
                f"{name} lets one packed document see another", fix="use another model, or report the architecture"
            )

    def _own_logits(self, hidden: torch.Tensor, probe: _Probe) -> torch.Tensor:
        logits = self.base(
            input_ids=probe.input_ids,
            position_ids=probe.position_ids,
            use_cache=False,
            cu_seq_lens_q=probe.cu_seqlens,
            max_length_q=probe.max_document,
        ).logits
        return logits[0].float().to(hidden.device)


class _Probe:
    """The part of a micro-batch that a decoder reads."""

    context = None

    def __init__(self, ids: torch.Tensor, borders: torch.Tensor) -> None:
        self.input_ids, self.cu_seqlens = ids, borders
        lengths = torch.diff(borders).tolist()
        self.position_ids = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
        self.max_document = max(lengths)
