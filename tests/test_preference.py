"""Losses of preference pairs against the papers' formulas, written out in fp64 with plain log and exp."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from swiftlite.config.losses import PAIR_LOSSES, REFERENCE_FREE, losses_of, parse_losses
from swiftlite.errors import UserError
from swiftlite.objectives.completions import completion_sums
from swiftlite.objectives.preference import LOSSES, PairScores, Preference, RunningReward

SMALLEST = torch.finfo(torch.float32).tiny  # below it fp32 has fewer digits
SMOOTHED = ("sigmoid", "robust", "exo_pair")


def scores_of(pairs=64, seed=0):
    """Whole completions of -50 to -400, a reference up to 40 away, 20 to 200 tokens."""
    random = torch.Generator().manual_seed(seed)

    def between(low, high):
        return low + (high - low) * torch.rand(pairs, generator=random)

    chosen, rejected = between(-400, -50), between(-400, -50)
    counts = [torch.randint(20, 200, (pairs,), generator=random) for _ in range(2)]
    return PairScores(
        chosen.requires_grad_(),
        rejected.requires_grad_(),
        *counts,
        chosen.detach() + between(-40, 40),
        rejected.detach() + between(-40, 40),
    )


def nll(x):  # -log s(x)
    return torch.log1p(torch.exp(-x))


def s(x):
    return 1 / (1 + torch.exp(-x))


def log_odds(a):
    return torch.log(torch.exp(a) / (1 - torch.exp(a)))


def formulas(pair, b, e, gamma, d):
    """The table of the losses, each from log-probabilities in fp64."""
    w, l_, rw, rl = pair.chosen, pair.rejected, pair.reference_chosen, pair.reference_rejected
    nw, nl = pair.chosen_tokens, pair.rejected_tokens
    h = (w - l_) - (rw - rl)
    z, m = b * h, s(b * h / 0.05)
    return {
        "sigmoid": lambda: (1 - e) * nll(z) + e * nll(-z),
        "hinge": lambda: torch.where(z < 1, 1 - z, torch.zeros_like(z)),
        "ipo": lambda: ((w - rw) / nw - (l_ - rl) / nl - 0.5 / b) ** 2,
        "robust": lambda: ((1 - e) * nll(z) - e * nll(-z)) / (1 - 2 * e),
        "exo_pair": lambda: s(z) * torch.log(s(z) / (1 - e)) + s(-z) * torch.log(s(-z) / e),
        "nca_pair": lambda: nll(b * (w - rw)) + 0.5 * nll(-b * (w - rw)) + 0.5 * nll(-b * (l_ - rl)),
        "bco_pair": lambda: nll(b * (w - rw) - d) + nll(d - b * (l_ - rl)),
        "sppo_hard": lambda: (w - rw - 0.5 / b) ** 2 + (l_ - rl + 0.5 / b) ** 2,
        "apo_zero": lambda: s(-b * (w - rw)) + s(b * (l_ - rl)),
        "apo_down": lambda: s(b * (w - rw)) + s(-z),
        "discopop": lambda: (1 - m) * nll(z) + m * torch.exp(-z),
        "simpo": lambda: nll(b * w / nw - b * l_ / nl - gamma),
        "cpo": lambda: nll(b * (w - l_)) - w / nw,
        "orpo": lambda: -w / nw + b * nll(log_odds(w / nw) - log_odds(l_ / nl)),
        "sft": lambda: -w / nw,
    }


def exact(pair):
    """The same pairs in fp64, with leaves of their own."""
    double = pair.double()
    return replace(
        double,
        chosen=double.chosen.detach().requires_grad_(),
        rejected=double.rejected.detach().requires_grad_(),
    )


def compare(preference, formula, pair, running_reward=0.0):
    """Loss and both gradients of each pair, to 1e-6 of each value."""
    ours, double = preference.per_pair(pair, running_reward), exact(pair)
    theirs = formula(double)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=SMALLEST)
    got = torch.autograd.grad(ours.sum(), (pair.chosen, pair.rejected), materialize_grads=True)
    expected = torch.autograd.grad(theirs.sum(), (double.chosen, double.rejected), materialize_grads=True)
    for left, right in zip(got, expected, strict=True):
        assert left.dtype == torch.float32
        torch.testing.assert_close(left.double(), right, rtol=1e-6, atol=SMALLEST)


def options_of(name, beta=0.1, smoothing=0.0):
    e = smoothing if name in SMOOTHED else 0.0
    return {
        "losses": ((name, 1.0),),
        "beta": beta,
        "label_smoothing": e or (1e-3 if name == "exo_pair" else 0.0),
        "simpo_gamma": 0.7 if name == "simpo" else None,
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("beta", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_each_loss_and_its_gradient_follow_the_formula(name, beta, smoothing):
    options = options_of(name, beta, smoothing)
    e, d = options["label_smoothing"], 0.37
    compare(Preference(**options), lambda pair: formulas(pair, beta, e, 0.7, d)[name](), scores_of(), running_reward=d)


def test_the_table_has_every_name_that_the_command_line_takes():
    assert tuple(LOSSES) == PAIR_LOSSES
    assert tuple(name for name, loss in LOSSES.items() if not loss.needs_reference) == REFERENCE_FREE


AT_START = {  # beta 0.1, to the digits of the table
    "sigmoid": 0.6931,
    "robust": 0.6931,
    "hinge": 1,
    "ipo": 25,
    "exo_pair": 2.7612,
    "nca_pair": 1.3863,
    "bco_pair": 1.3863,
    "sppo_hard": 50,
    "apo_zero": 1,
    "apo_down": 1,
    "discopop": 0.8466,
}


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("beta", [0.1, 0.4])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_value_where_policy_and_reference_are_equal(name, beta, smoothing):
    preference = Preference(**options_of(name, beta, smoothing))
    stated = preference.step_zero()
    if name not in AT_START:
        assert stated is None
        assert not preference.needs_reference
        return
    pair = scores_of()
    same = replace(pair, reference_chosen=pair.chosen.detach(), reference_rejected=pair.rejected.detach())
    assert preference.needs_reference
    torch.testing.assert_close(preference.per_pair(same), torch.full((64,), stated), rtol=1e-7, atol=0)
    if beta == 0.1 and not smoothing:
        assert stated == pytest.approx(AT_START[name], abs=5e-5)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_extreme_scores_give_finite_losses_and_gradients(name):
    ends = torch.tensor([-1e5, -1e3, -1e-7, 0.0])
    chosen, rejected, reference, other = (grid.flatten() for grid in torch.meshgrid(*[ends] * 4, indexing="ij"))
    count = torch.full(chosen.shape, 3)
    pair = PairScores(chosen.requires_grad_(), rejected.requires_grad_(), count, count, reference, other)
    loss = Preference(**options_of(name, beta=1.0)).per_pair(pair, running_reward=-50.0)
    grads = torch.autograd.grad(loss.sum(), (pair.chosen, pair.rejected), materialize_grads=True)
    assert all(torch.isfinite(values).all() for values in (loss, *grads))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_label_smoothing_acts_or_is_refused(name):
    if name not in SMOOTHED:
        with pytest.raises(UserError, match="label-smoothing"):
            Preference(((name, 1.0),), label_smoothing=0.1)
        with pytest.raises(UserError, match=name) if name != "sft" else pytest.raises(UserError, match="hinge"):
            Preference((("sigmoid", 1.0), ("hinge", 1.0), *([] if name == "hinge" else [(name, 1.0)])), 0.1, 0.1)
        return
    pair = scores_of()
    less, more = (Preference(((name, 1.0),), label_smoothing=e).per_pair(pair) for e in (0.05, 0.2))
    assert ((less - more).abs() > 1e-3).any()


def test_smoothing_passes_the_likelihood_term_beside_a_smoothed_loss():
    Preference((("sigmoid", 0.8), ("sft", 1.0)), label_smoothing=0.1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"losses": ()}, "no preference loss"),
        ({"losses": (("dpo", 1.0),)}, "unknown"),
        ({"losses": (("sigmoid", 0.0),)}, "weight"),
        ({"losses": (("sigmoid", math.nan),)}, "weight"),
        ({"losses": (("sigmoid", 1.0), ("sigmoid", 1.0))}, "twice"),
        ({"beta": 0.0}, "--beta"),
        ({"beta": math.inf}, "--beta"),
        ({"label_smoothing": 0.5}, "--label-smoothing"),
        ({"label_smoothing": -0.1}, "--label-smoothing"),
        ({"losses": (("exo_pair", 1.0),)}, "exo_pair needs"),
        ({"rpo_alpha": -1.0}, "--rpo-alpha"),
        ({"simpo_gamma": 0.5}, "no effect"),
        ({"losses": (("simpo", 1.0),), "simpo_gamma": -0.5}, "--simpo-gamma"),
    ],
)
def test_options_that_nothing_would_follow_are_refused(options, word):
    with pytest.raises(UserError, match=word):
        Preference(**options)


def test_a_weighted_sum_with_the_rpo_term():
    preference = Preference((("sigmoid", 0.8), ("ipo", 0.2), ("sft", 1.5)), beta=0.2, rpo_alpha=0.3)

    def formula(pair):
        table = formulas(pair, 0.2, 0.0, 0.0, 0.0)
        return 0.8 * table["sigmoid"]() + 0.2 * table["ipo"]() + 1.8 * table["sft"]()

    compare(preference, formula, scores_of())
    assert preference.needs_reference
    assert preference.step_zero() is None
    assert Preference(rpo_alpha=0.3).step_zero() is None
    assert Preference((("sigmoid", 0.5), ("hinge", 2.0))).step_zero() == pytest.approx(0.5 * math.log(2) + 2)


def test_simpo_has_a_margin_where_none_is_given():
    pair = scores_of()
    default, stated = (Preference((("simpo", 1.0),), simpo_gamma=gamma).per_pair(pair) for gamma in (None, 0.5))
    assert torch.equal(default, stated)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("sizes", [[32], [1, 31], [7, 0, 9, 16], [1] * 32])
def test_mean_over_pairs_does_not_depend_on_micro_batches(name, sizes):
    """From token log-probabilities on; a micro-batch may be empty."""
    preference, pairs = Preference(**options_of(name)), 32
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 30, (2 * pairs,), generator=random)
    logprobs = (-4 * torch.rand(int(lengths.sum()), generator=random)).requires_grad_()
    owner = torch.arange(2 * pairs).repeat_interleave(lengths)
    reference = completion_sums(logprobs.detach(), owner, 2 * pairs) + torch.randn(2 * pairs, generator=random)

    total, start = torch.zeros(()), 0
    for size in sizes:
        rows = torch.arange(2 * start, 2 * (start + size))
        mine = (owner >= 2 * start) & (owner < 2 * (start + size))
        sums = completion_sums(logprobs[mine], owner[mine] - 2 * start, 2 * size)
        counts = lengths[rows]
        scores = PairScores(
            sums[::2], sums[1::2], counts[::2], counts[1::2], reference[rows][::2], reference[rows][1::2]
        )
        loss = preference.per_pair(scores).sum() / pairs
        loss.backward()
        total, start = total + loss.detach(), start + size

    sums = completion_sums(logprobs.detach(), owner, 2 * pairs).requires_grad_()
    whole = PairScores(sums[::2], sums[1::2], lengths[::2], lengths[1::2], reference[::2], reference[1::2])
    mean = preference.per_pair(whole).mean()
    (grad,) = torch.autograd.grad(mean, sums)
    torch.testing.assert_close(total, mean.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logprobs.grad, grad[owner].float(), rtol=1e-6, atol=SMALLEST)


def test_completion_sums_of_tokens_in_any_order():
    random = torch.Generator().manual_seed(2)
    logprobs = torch.randn(40, generator=random, dtype=torch.bfloat16).requires_grad_()
    owner = torch.randint(0, 3, (40,), generator=random)
    sums = completion_sums(logprobs, owner, 5)
    expected = torch.stack([logprobs.double()[owner == row].sum() for row in range(5)])
    torch.testing.assert_close(sums, expected, rtol=1e-15, atol=1e-15)
    assert sums[3:].tolist() == [0, 0]
    (sums * torch.arange(5)).sum().backward()
    assert torch.equal(logprobs.grad.float(), owner.float())


def test_differences_of_long_completions_are_not_rounded_away():
    logprobs = -5 * torch.rand(3000, generator=torch.Generator().manual_seed(3))
    better = logprobs.clone()
    better[0] += 1e-4
    sums = completion_sums(torch.cat([logprobs, better]), torch.arange(2).repeat_interleave(3000), 2)
    assert (sums[1] - sums[0]).item() == pytest.approx(1e-4, rel=1e-2)


def test_metrics_add_up_over_micro_batches():
    pair = PairScores(
        torch.tensor([-10.0, -20.0, -30.0], requires_grad=True),
        torch.tensor([-12.0, -15.0, -30.0]),
        torch.tensor([5, 4, 10]),
        torch.tensor([6, 3, 10]),
        torch.tensor([-11.0, -20.0, -31.0]),
        torch.tensor([-11.0, -15.0, -31.0]),
    )
    found = {name: value.item() for name, value in Preference(beta=0.5).metrics(pair).items()}
    assert found == {
        "rewards/chosen": 1.0,
        "rewards/rejected": 0.0,
        "rewards/accuracy": 1.0,  # one ahead, two equal
        "rewards/margin": 1.0,
        "logps/chosen": -60.0,
        "logps/rejected": -57.0,
        "kl/reference": -1.0,  # (-1 + 1) / 2 + 0 + (-1 - 1) / 2
    }
    assert not any(value.requires_grad for value in Preference().metrics(pair).values())
    assert "kl/reference" not in Preference((("cpo", 1.0),)).metrics(pair)


@pytest.mark.parametrize(
    ("name", "chosen"), [("simpo", -2 - 5 - 3), ("orpo", -2 - 5 - 3), ("cpo", -60), ("sft", -60), ("ipo", 2)]
)
def test_rewards_are_of_what_the_loss_compares(name, chosen):
    pair = PairScores(
        torch.tensor([-10.0, -20.0, -30.0]),
        torch.tensor([-12.0, -15.0, -30.0]),
        torch.tensor([5, 4, 10]),
        torch.tensor([6, 3, 10]),
        *([torch.tensor([-11.0, -20.0, -31.0])] * 2 if name == "ipo" else []),
    )
    found = Preference(((name, 1.0),), beta=0.5).metrics(pair)
    assert found["rewards/chosen"].item() == pytest.approx(0.5 * chosen)
    assert found["logps/chosen"].item() == -60


def test_running_reward_is_the_mean_over_the_steps_so_far():
    state = RunningReward()
    assert state.mean == 0
    state = state.after(chosen=6.0, rejected=-2.0, pairs=4).after(chosen=1.0, rejected=1.0, pairs=1)
    assert state == RunningReward(total=6.0, pairs=5)
    assert state.mean == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("words", "losses"),
    [
        (["sigmoid"], [("sigmoid", 1.0)]),
        (["sigmoid:0.8", "sft:1.0"], [("sigmoid", 0.8), ("sft", 1.0)]),
        (["sigmoid:.8, sft"], [("sigmoid", 0.8), ("sft", 1.0)]),
        (["EXO-pair:2e-1"], [("exo_pair", 0.2)]),
    ],
)
def test_losses_are_parsed(words, losses):
    assert parse_losses(words) == losses


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sigmoyd"], "did you mean `sigmoid`"),
        (["dpo"], "did you mean `sigmoid`"),
        (["bco"], "did you mean `bco_pair`"),
        (["apo-zer"], "did you mean `apo_zero`"),
        (["zzz"], "fix: the losses are sigmoid"),
        ([":1"], "unknown loss ``"),
        (["sigmoid:"], "a number above 0"),
        (["sigmoid:0"], "a number above 0"),
        (["sigmoid:-1"], "a number above 0"),
        (["sigmoid:nan"], "a number above 0"),
        (["sigmoid:1e999"], "a number above 0"),
        (["sigmoid", "sigmoid:2"], "twice"),
        ([""], "no loss is named"),
    ],
)
def test_losses_that_cannot_be_parsed_say_what_is_wrong(words, text):
    with pytest.raises(UserError) as error:
        parse_losses(words)
    assert text in str(error.value)
    assert "where: --loss" in str(error.value)


@pytest.mark.parametrize(
    ("words", "loss"),
    [([], "cross_entropy"), (["DFT"], "dft"), (["nll"], "cross_entropy"), (["cross-Entropy"], "cross_entropy")],
)
def test_sft_takes_one_of_two_losses(words, loss):
    assert losses_of("sft", words) == [(loss, 1.0)]


@pytest.mark.parametrize(
    ("method", "words", "text"),
    [
        ("sft", ["dtf"], "did you mean `dft`? the losses are cross_entropy, dft"),
        ("sft", ["sigmoid"], "`swiftlite dpo` has it; the losses are cross_entropy, dft"),
        ("dpo", ["dft"], "`swiftlite sft` has it; the losses are sigmoid"),
        ("kto", ["nll"], "unknown loss `nll`"),
        ("sft", ["dft:0.5"], "sft takes one loss without a weight"),
        ("sft", ["cross_entropy", "dft"], "fix: use --loss dft"),
        ("kto", ["kto:2"], "fix: use --loss kto"),
    ],
)
def test_losses_of_other_methods_are_told(method, words, text):
    with pytest.raises(UserError) as error:
        losses_of(method, words)
    assert text in str(error.value)
