"""Runs TRL's own trainers' loss functions and swiftlite's on the same logits and prints how far they are apart.

    python -m venv trl && trl/bin/pip install trl==1.16.0 transformers==5.23.0
    PYTHONPATH=. trl/bin/python scripts/compare_trl_preference.py [--markdown docs/preference.md]

The logits are random, `[2 pairs, tokens, vocabulary]`; the reference's sums lie up to 40 from the policy's. Each pair
is a batch of its own, where TRL's means over a batch's tokens are means over the pair's; the last column is of one
batch of all pairs. Differences are relative, of the worst pair: of losses to TRL's loss in fp64, of gradients (of the
logits) to the largest of TRL's in fp64. In fp64 they show definitions; in fp32 each tool's rounding.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MethodType, SimpleNamespace

import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer

from swiftlite.objectives.completions import completion_sums
from swiftlite.objectives.preference import PairScores, Preference
from swiftlite.objectives.reward import RewardModel
from swiftlite.objectives.unpaired import RowScores, Unpaired, reference_point

PLACE = re.compile(r"(<!-- compare_trl_preference -->\n).*?(<!-- /compare_trl_preference -->)", re.DOTALL)
PAIRS, PROMPT, LONGEST, VOCABULARY = 16, 6, 80, 50
BETA, EPSILON, GAMMA = 0.1, 0.1, 0.6
CPU = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)


@dataclass(frozen=True)
class Batch:
    """Rows of chosen completions, then as many of rejected ones. logits: `[rows, tokens, vocabulary]`, a leaf."""

    logits: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    reference: torch.Tensor

    def pick(self, pairs: range, dtype: torch.dtype) -> Batch:
        """Some pairs with a leaf of their own."""
        rows = [*pairs, *[len(self.ids) // 2 + pair for pair in pairs]]
        logits = self.logits.detach()[rows].to(dtype).requires_grad_()
        return Batch(logits, self.ids[rows], self.mask[rows], self.reference[rows].to(dtype))

    def token_logprobs(self) -> torch.Tensor:
        """`[rows, tokens - 1]`, 0 outside the completion, as TRL's models give them."""
        every = self.logits[:, :-1].log_softmax(-1).gather(-1, self.ids[:, 1:, None])[..., 0]
        return every * self.mask[:, 1:]

    def sums(self) -> torch.Tensor:
        """`[rows]`; in fp32 by swiftlite's own function."""
        inside = self.mask[:, 1:].bool()
        if self.logits.dtype == torch.float64:
            return self.token_logprobs().sum(-1)
        return completion_sums(self.token_logprobs()[inside], inside.nonzero()[:, 0], len(self.ids))

    def pair_scores(self) -> PairScores:
        counts = self.mask[:, 1:].sum(-1).chunk(2)
        return PairScores(*self.sums().chunk(2), *counts, *self.reference.chunk(2))


def make_batch(prompt: int) -> Batch:
    """All pairs, of numbers that fp32 holds."""
    random, rows = torch.Generator().manual_seed(5), 2 * PAIRS
    logits = torch.randn(rows, prompt + LONGEST, VOCABULARY, generator=random)
    ids = torch.randint(0, VOCABULARY, logits.shape[:2], generator=random)
    lengths = torch.randint(LONGEST // 4, LONGEST + 1, (rows,), generator=random)
    at = torch.arange(prompt + LONGEST)
    mask = ((at >= prompt) & (at < prompt + lengths[:, None])).long()
    policy = Batch(logits.double(), ids, mask, torch.zeros(rows)).sums()
    return Batch(logits, ids, mask, (policy + 80 * torch.rand(rows, generator=random) - 40).float())


def trainer(**settings: object) -> SimpleNamespace:
    """What the trainers' loss functions read of themselves."""
    common = {
        "accelerator": CPU,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "beta": BETA,
    }
    return SimpleNamespace(**(common | settings))


def fused_outputs(batch: Batch) -> SimpleNamespace:
    logprobs = batch.token_logprobs()
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trl_dpo(batch: Batch, losses: dict[str, float], smoothing: float) -> torch.Tensor:
    own = trainer(
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        label_smoothing=smoothing,
        args=SimpleNamespace(discopop_tau=0.05),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        use_weighting=False,
    )
    chosen, rejected = batch.reference.chunk(2)
    inputs = {
        "input_ids": batch.ids,
        "completion_mask": batch.mask,
        "attention_mask": batch.mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    return DPOTrainer._compute_loss(own, lambda **_: fused_outputs(batch), inputs, return_outputs=False)


def trl_reference_free(batch: Batch, loss: str, smoothing: float = 0.0) -> torch.Tensor:
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    kind = ORPOTrainer if loss == "orpo" else CPOTrainer
    own = trainer(
        loss_type="sigmoid" if loss == "cpo" else loss,
        cpo_alpha=1.0 if loss == "cpo" else 0.0,
        simpo_gamma=GAMMA,
        alpha=0.0,
        label_smoothing=smoothing,
        pad_token_id=0,
        padding_value=0,
        concatenated_inputs=kind.concatenated_inputs,
        get_batch_logps=kind.get_batch_logps,
    )
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(kind, name):
            setattr(own, name, MethodType(getattr(kind, name), own))
    seen = (torch.arange(batch.ids.shape[1]) < PROMPT) | batch.mask.bool()
    labels = batch.ids.masked_fill(batch.mask == 0, -100)
    inputs = {}
    for side, part in (("chosen", 0), ("rejected", 1)):
        inputs[f"{side}_input_ids"] = batch.ids.chunk(2)[part]
        inputs[f"{side}_attention_mask"] = seen.long().chunk(2)[part]
        inputs[f"{side}_labels"] = labels.chunk(2)[part]
    model = lambda *_, **__: SimpleNamespace(logits=batch.logits)  # noqa: E731
    return kind.get_batch_loss_metrics(own, model, inputs)[0]


def trl_unpaired(batch: Batch, loss: str) -> torch.Tensor:
    """Chosen rows as desirable, rejected ones as undesirable; the mismatched pairs are the rows, one further on."""
    logratio = batch.token_logprobs().sum(-1).detach() - batch.reference
    own = trainer(
        loss_type=loss,
        calculate_KL=loss == "kto",
        precompute_ref_logps=True,
        desirable_weight=1.2,
        undesirable_weight=0.9,
        _compute_kl_logps=lambda *_: logratio.roll(1),
    )
    inputs = {
        "input_ids": batch.ids,
        "completion_mask": batch.mask,
        "attention_mask": batch.mask,
        "label": torch.arange(len(batch.ids)) < len(batch.ids) // 2,
        "ref_logps": batch.reference,
        "ref_KL_logps": torch.zeros_like(logratio),
    }
    return KTOTrainer._compute_loss(own, lambda **_: fused_outputs(batch), inputs, return_outputs=False)


def our_unpaired(batch: Batch, loss: str) -> torch.Tensor:
    sums = batch.sums()
    z0 = reference_point((sums - batch.reference).sum(), len(sums))
    scores = RowScores(sums, batch.reference, torch.arange(len(sums)) < len(sums) // 2)
    return Unpaired(loss, BETA, 1.2, 0.9).per_row(scores, z0).mean()


def rewards_of(batch: Batch) -> torch.Tensor:
    return batch.logits[:, PROMPT, 0]


def trl_reward(batch: Batch) -> torch.Tensor:
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=0.01))
    inputs = {"attention_mask": batch.mask, "margin": batch.reference.chunk(2)[0].abs() / 100}
    model = lambda **_: SimpleNamespace(logits=rewards_of(batch)[:, None])  # noqa: E731
    return RewardTrainer.compute_loss(own, model, inputs)


def our_reward(batch: Batch) -> torch.Tensor:
    margin = batch.reference.chunk(2)[0].abs() / 100
    return RewardModel(0.01).per_pair(*rewards_of(batch).chunk(2), margin).mean()


Case = tuple[Callable[[Batch], torch.Tensor], Callable[[Batch], torch.Tensor], int]  # TRL's, ours, prompt tokens


def pair_case(losses: dict[str, float], smoothing: float = 0.0) -> Case:
    preference = Preference(tuple(losses.items()), BETA, smoothing)
    return (
        lambda batch: trl_dpo(batch, losses, smoothing),
        lambda batch: preference.per_pair(batch.pair_scores()).mean(),
        PROMPT,
    )


def free_case(loss: str, prompt: int = PROMPT) -> Case:
    preference = Preference(((loss, 1.0),), BETA, simpo_gamma=GAMMA if loss == "simpo" else None)
    ours = lambda batch: preference.per_pair(batch.pair_scores()).mean()  # noqa: E731
    return lambda batch: trl_reference_free(batch, loss), ours, prompt


def cdpo_case() -> Case:
    """cDPO as TRL still has it: in its CPO trainer without NLL and reference; here a reference of log-probability 0."""
    preference = Preference((("sigmoid", 1.0),), BETA, EPSILON)

    def ours(batch: Batch) -> torch.Tensor:
        zero = torch.zeros(len(batch.ids) // 2, dtype=batch.logits.dtype)
        return preference.per_pair(replace(batch.pair_scores(), reference_chosen=zero, reference_rejected=zero)).mean()

    return lambda batch: trl_reference_free(batch, "sigmoid", EPSILON), ours, PROMPT


def cases() -> dict[str, Case]:
    plain = ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "sft")
    found = {name: pair_case({name: 1.0}) for name in plain}
    for name in ("sigmoid", "robust", "exo_pair"):
        found[f"{name}, label smoothing {EPSILON}"] = pair_case({name: 1.0}, EPSILON)
    found["sigmoid:0.8 sft:1.0"] = pair_case({"sigmoid": 0.8, "sft": 1.0})
    found |= {name: free_case(name) for name in ("simpo", "cpo", "orpo")}
    found["orpo, prompt of one token"] = free_case("orpo", prompt=1)
    found[f"sigmoid in CPOTrainer, label smoothing {EPSILON}"] = cdpo_case()
    for name in ("kto", "apo_zero_unpaired"):
        trl, ours = (lambda batch, n=name: trl_unpaired(batch, n)), (lambda batch, n=name: our_unpaired(batch, n))
        found[name] = trl, ours, PROMPT
    found["reward model, margin and centring"] = trl_reward, our_reward, PROMPT
    return found


def run(loss: Callable[[Batch], torch.Tensor], batch: Batch, pairs: range, dtype: torch.dtype) -> list[torch.Tensor]:
    """Loss and gradient in fp64."""
    part = batch.pick(pairs, dtype)
    value = loss(part)
    return [value.detach().double(), torch.autograd.grad(value, part.logits)[0].double()]


def apart(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Relative differences of loss and gradient; absolute ones of a loss that is 0."""
    return [
        (left - right).abs().max().item() / (right.abs().max().item() or 1.0)
        for left, right in zip(found, exact, strict=True)
    ]


def row(case: Case) -> list[float]:
    """The numbers of a line of the table."""
    trl, ours, prompt = case
    batch, worst = make_batch(prompt), [0.0] * 6
    for pair in range(PAIRS):
        one = range(pair, pair + 1)
        exact = run(trl, batch, one, torch.float64)
        tries = ((ours, torch.float64), (ours, torch.float32), (trl, torch.float32))
        numbers = [number for loss, dtype in tries for number in apart(run(loss, batch, one, dtype), exact)]
        worst = [max(both) for both in zip(worst, numbers, strict=True)]
    step = [run(loss, batch, range(PAIRS), torch.float64) for loss in (ours, trl)]
    return [*worst, apart(*step)[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", type=Path, help="a page whose marked place is filled with the table")
    options = parser.parse_args()
    lines = [
        f"TRL {version('trl')}, torch {version('torch')}, {os.cpu_count()} cores of {platform.machine()};"
        f" {PAIRS} pairs, beta {BETA}.",
        "",
        "| loss | fp64: loss | gradient | swiftlite fp32: loss | gradient | TRL fp32: loss | gradient | step, fp64 |",
        "|---" * 8 + "|",
    ]
    for name, case in cases().items():
        lines.append(f"| {name} | " + " | ".join(f"{number:.0e}" for number in row(case)) + " |")
        print(lines[-1], flush=True)
    if options.markdown:
        text = options.markdown.read_text(encoding="utf-8")
        filled = PLACE.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], text)
        options.markdown.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
