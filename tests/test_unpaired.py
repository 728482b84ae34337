"""KTO, unpaired APO and the reward model against formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from swiftlite.config.losses import UNPAIRED_LOSSES
from swiftlite.errors import UserError
from swiftlite.objectives.reward import RewardModel, reward_metrics
from swiftlite.objectives.unpaired import RowScores, Unpaired, metric_means, reference_point


def rows_of(rows=64, share=0.4, seed=0):
    random = torch.Generator().manual_seed(seed)
    policy = -50 - 350 * torch.rand(rows, generator=random)
    reference = policy + 80 * torch.rand(rows, generator=random) - 40
    return RowScores(policy.requires_grad_(), reference, torch.rand(rows, generator=random) < share)


def s(x):
    return 1 / (1 + torch.exp(-x))


def expected_row(policy, reference, desirable, loss, b, lam_d, lam_u, z0):
    r = policy - reference
    if loss == "apo_zero_unpaired":
        return lam_d * s(-b * r) if desirable else lam_u * s(b * r)
    return lam_d * s(-b * (r - z0)) if desirable else lam_u * s(-b * (z0 - r))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("z0", [0.0, 7.3])
@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_each_row_and_its_gradient_follow_the_formula(loss, z0, share):
    scores, options = rows_of(share=share), Unpaired(loss, 0.2, 1.3, 0.7)
    ours = options.per_row(scores, torch.tensor(z0))
    policy = scores.policy.detach().double().requires_grad_()
    rows = zip(policy, scores.reference.double(), scores.desirable.tolist(), strict=True)
    z0 = torch.tensor(z0).double()
    theirs = torch.stack([expected_row(*row, loss, 0.2, 1.3, 0.7, z0) for row in rows])
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)
    (got,) = torch.autograd.grad(ours.sum(), scores.policy)
    (expected,) = torch.autograd.grad(theirs.sum(), policy)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_the_unpaired_value_where_policy_and_reference_are_equal(loss):
    scores = rows_of()
    same = RowScores(scores.policy, scores.policy.detach(), scores.desirable)
    desirable = int(same.desirable.sum())
    assert (Unpaired(loss).per_row(same) == 0.5).all()
    assert Unpaired(loss).step_zero(desirable, 64 - desirable) == 0.5
    weighted = Unpaired(loss, 0.1, 2.0, 0.5)
    mean = weighted.per_row(same).mean().item()
    assert mean == pytest.approx(weighted.step_zero(desirable, 64 - desirable), rel=1e-6)


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_extreme_rows_are_finite(loss):
    policy = torch.tensor([-1e5, 0.0, -1e5, 0.0], requires_grad=True)
    scores = RowScores(policy, torch.tensor([0.0, -1e5, 0.0, -1e5]), torch.tensor([True, True, False, False]))
    values = Unpaired(loss, beta=1.0).per_row(scores, 1e4)
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(policy.grad).all()


def test_the_mean_over_rows_does_not_depend_on_micro_batches():
    scores, options = rows_of(), Unpaired()
    whole = options.per_row(scores, 1.5).mean()
    (expected,) = torch.autograd.grad(whole, scores.policy)
    order = scores.desirable.int().argsort()  # micro-batches of one label only, and empty ones
    total = torch.zeros(())
    for part in torch.split(order, [10, 0, 1, 53]):
        micro = RowScores(scores.policy[part], scores.reference[part], scores.desirable[part])
        loss = options.per_row(micro, 1.5).sum() / 64
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(scores.policy.grad, expected, rtol=1e-6, atol=0)


def test_the_reference_point_is_a_mean_that_never_falls_below_zero():
    total = torch.tensor(6.0, requires_grad=True)
    assert reference_point(total, 4).item() == 1.5
    assert not reference_point(total, 4).requires_grad
    assert reference_point(-total, 4).item() == 0
    assert reference_point(torch.tensor(0.0), 0).item() == 0


def test_unpaired_metrics_are_sums_of_each_label():
    scores = RowScores(
        torch.tensor([-10.0, -20.0, -30.0, -40.0], requires_grad=True),
        torch.tensor([-12.0, -20.0, -33.0, -30.0]),
        torch.tensor([True, True, False, False]),
    )
    sums = {name: value.item() for name, value in Unpaired(beta=0.5).metrics(scores, 1.0).items()}
    assert sums == {
        "rewards/chosen": 1.0,
        "rewards/rejected": -3.5,
        "rewards/accuracy": 2.0,  # 2 > 1 and -10 < 1; not 0 > 1, not 3 < 1
        "logps/chosen": -30.0,
        "logps/rejected": -70.0,
        "count/chosen": 2.0,
        "count/rejected": 2.0,
        "kl/reference": 4.0,
    }
    assert metric_means(sums) == {
        "rewards/chosen": 0.5,
        "rewards/rejected": -1.75,
        "rewards/accuracy": 0.5,
        "rewards/margin": 2.25,
        "kl/reference": 1.0,
        "logps/chosen": -15.0,
        "logps/rejected": -35.0,
    }


def test_a_step_of_one_label_has_no_mean_of_the_other():
    scores = RowScores(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([True]))
    means = metric_means({name: value.item() for name, value in Unpaired().metrics(scores).items()})
    assert means["rewards/rejected"] is means["rewards/margin"] is means["logps/rejected"] is None
    assert means["rewards/accuracy"] == 1
    assert "kl/reference" not in Unpaired("apo_zero_unpaired").metrics(scores)  # it compares with no z0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"loss": "sigmoid"}, "unknown"),
        ({"beta": 0.0}, "--beta"),
        ({"desirable_weight": -1.0}, "--desirable"),
        ({"undesirable_weight": math.nan}, "--undesirable"),
    ],
)
def test_unpaired_options_out_of_range_are_refused(options, word):
    with pytest.raises(UserError, match=word):
        Unpaired(**options)


@pytest.mark.parametrize("centring", [0.0, 0.01])
@pytest.mark.parametrize("with_margin", [False, True])
def test_reward_loss_and_gradient_follow_the_formula(with_margin, centring):
    random = torch.Generator().manual_seed(3)
    rewards = [(8 * torch.randn(64, generator=random)).requires_grad_() for _ in range(2)]
    margin = 3 * torch.rand(64, generator=random) if with_margin else None
    ours = RewardModel(centring).per_pair(*rewards, margin)
    w, l_ = (reward.detach().double().requires_grad_() for reward in rewards)
    m = 0 if margin is None else margin.double()
    theirs = torch.log(1 + torch.exp(l_ - w + m)) + centring * (w + l_) ** 2
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-12)
    got, expected = torch.autograd.grad(ours.sum(), rewards), torch.autograd.grad(theirs.sum(), (w, l_))
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-6, atol=1e-12)


def test_reward_of_a_zero_head_and_of_extremes():
    zero = torch.zeros(3)
    assert RewardModel(0.1).per_pair(zero, zero).tolist() == pytest.approx([RewardModel().step_zero()] * 3)
    chosen = torch.tensor([-1e5, 1e5], requires_grad=True)
    loss = RewardModel().per_pair(chosen, -chosen.detach())
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert chosen.grad.tolist() == [-1, 0]
    with pytest.raises(UserError, match="centring"):
        RewardModel(-0.1)


def test_reward_metrics_are_sums():
    sums = reward_metrics(torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([0.0, 2.0, 5.0]))
    assert {name: value.item() for name, value in sums.items()} == {
        "rewards/chosen": 6.0,
        "rewards/rejected": 7.0,
        "rewards/accuracy": 1.0,
        "rewards/margin": -1.0,
    }
