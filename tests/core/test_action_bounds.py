# SPDX-License-Identifier: Apache-2.0
"""Every kind of bounds of continuous actions, with every policy over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.contract import Mode
from torchbeast.core.actors.distributions import Gaussian, SquashedGaussian
from torchbeast.core.actors.off_policy import (
    Critics,
    DeterministicActorCritic,
    StochasticActorCritic,
)
from torchbeast.core.base.nest import Nest
from torchbeast.core.envs.spaces import Box
from torchbeast.core.envs.sync_vec_env import in_bounds

INF, MOST, MOST64 = math.inf, float(np.finfo(np.float32).max), float(np.finfo(np.float64).max)
BOXES = {
    "finite": Box(-2.0, 6.0, (2,)),
    "far from 0": Box(100.0, 101.0, (2,)),
    "infinite": Box(-INF, INF, (2,)),
    "infinite below": Box(-INF, (3.0, -300.0), (2,)),
    "infinite above": Box((0.0, 100.0), INF, (2,)),
    "the largest floats": Box(-MOST, MOST, (2,)),
    "the largest doubles": Box(-MOST64, MOST64, (2,), "float64"),
    "the largest halves": Box(-65504.0, 65504.0, (2,), "float16"),
    "the largest int32": Box(-(2.0**31), 2.0**31 - 1, (2,)),
    "beyond half of the largest floats": Box(-2e38, 2e38, (2,)),
    "equal": Box(3.0, 3.0, (2,)),
    "equal and far": Box(-MOST, -MOST, (2,)),
    "closer than float32": Box(1.0, 1.0 + 1e-12, (2,), "float64"),
    "narrow": Box(0.0, 1e-42, (2,)),
    "narrow doubles": Box(-1e-300, 1e-300, (2,), "float64"),
    "asymmetric": Box(-1.0, MOST, (2,)),
    "asymmetric below": Box(-1e30, 50.0, (2,)),
    "both out of reach": Box(1e300, 2e300, (2,), "float64"),
    "mixed": Box((-1.0, -INF, 5.0, -MOST, 2.0), (1.0, INF, INF, MOST, 2.0), (5,)),
    "doubles": Box(-0.1, 0.3, (2,), "float64"),
    "halves": Box(-0.1, 0.3, (2,), "float16"),
    "one number": Box(-MOST, 7.0, ()),
    "rows": Box(-INF, 1e6, (2, 3)),
}
# An environment's bounds leave no choice here, or numbers that float32 cannot tell apart.
WITHOUT_CHOICE = {
    "equal",
    "equal and far",
    "closer than float32",
    "narrow",
    "narrow doubles",
    "both out of reach",
}
OF_HALVES = {"halves", "the largest halves"}  # whose rounding moves a log-probability
N = 500
MODES: tuple[Mode, ...] = ("sample", "greedy", "explore")

SQUASHABLE = ["finite", "far from 0", "doubles", "halves"]
POLICIES = [(Gaussian, name) for name in BOXES] + [(SquashedGaussian, name) for name in SQUASHABLE]


def executed(box: Box, action: Any) -> np.ndarray:
    """Returns the actions [N, size] that an environment gets, in float64."""
    assert action.isfinite().all()
    assert action.dtype == getattr(torch, box.dtype) and action.shape[1:] == box.shape
    return in_bounds(box, action.numpy(), len(action)).reshape(len(action), -1).astype(np.float64)


def check_learnable(name: str, box: Box, action: Any) -> None:
    """Random actions are within bounds, and many of them leave room on both sides."""
    rows, (low, high) = executed(box, action), map(np.array, (box.low, box.high))
    dtype = np.dtype(box.dtype)
    assert (rows >= low.astype(dtype)).all() and (rows <= high.astype(dtype)).all()
    if name not in WITHOUT_CHOICE:
        free = (low < high) & (rows > low) & (rows < high)
        assert (free.mean(0)[low < high] > 0.2).all()
        assert (np.abs(rows).max(0) < 1e3).all()


@pytest.mark.parametrize(("kind", "name"), POLICIES)
def test_actions_and_densities_and_their_gradients_are_finite_within_any_bounds(
    kind: Callable[[Box], Gaussian], name: str
) -> None:
    torch.manual_seed(0)
    box = BOXES[name]
    ours = kind(box)
    params = torch.zeros(N, ours.num_params)
    check_learnable(name, box, ours.sample(params))
    executed(box, ours.zero_action((N,)))
    for scale in (0.0, 1.0, 30.0):
        p, q = scale * torch.randn(2, N, ours.num_params)
        p.requires_grad_()
        action = ours.sample(p.detach())
        executed(box, action)
        executed(box, ours.mode(p.detach()))
        assert ours.features(action).isfinite().all()
        metrics = [ours.log_prob(p, action), ours.entropy(p), ours.kl(p, q)]
        if isinstance(ours, SquashedGaussian):
            drawn, log_prob = ours.rsample(p)
            metrics += [log_prob, ours.features(drawn).sum(-1)]
        assert all(figure.isfinite().all() for figure in metrics)
        torch.stack([figure.mean() for figure in metrics]).sum().backward()
        assert p.grad is not None and p.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "name"), [pair for pair in POLICIES if pair[1] not in WITHOUT_CHOICE | OF_HALVES]
)
def test_the_mean_log_prob_of_samples_is_the_negative_entropy_within_any_bounds(
    kind: Callable[[Box], Gaussian], name: str
) -> None:
    torch.manual_seed(0)
    ours = kind(BOXES[name])
    params = (0.2 * torch.randn(ours.num_params)).expand(20_000, -1)
    log_probs = ours.log_prob(params, ours.sample(params))
    error = log_probs.std() / math.sqrt(len(params))
    assert abs(log_probs.mean() + ours.entropy(params[0])) < 5 * error + 5e-3


class Stochastic(StochasticActorCritic):
    def __init__(self, box: Box) -> None:
        super().__init__()
        self.distribution = SquashedGaussian(box)

    def make_critics(self) -> Critics:
        raise NotImplementedError

    def forward(self, observation: Nest[Tensor]) -> Tensor:
        raise NotImplementedError


class Deterministic(DeterministicActorCritic):
    def __init__(self, box: Box) -> None:
        super().__init__()
        self.distribution = SquashedGaussian(box)
        self.noise.fill_(0.5)

    make_critics, forward = Stochastic.make_critics, Stochastic.forward


@pytest.mark.parametrize("name", sorted(BOXES.keys() - set(SQUASHABLE)))
def test_a_squashed_policy_refuses_bounds_that_it_cannot_scale_by(name: str) -> None:
    message = "need low below high in every entry of a Box .* both within .*in entry .: decl"
    with pytest.raises(ValueError, match=message):
        SquashedGaussian(BOXES[name])


@pytest.mark.parametrize("kind", [Stochastic, Deterministic])
@pytest.mark.parametrize("name", SQUASHABLE)
def test_off_policy_actors_choose_finite_actions_within_any_bounds(
    kind: Callable[[Box], Stochastic | Deterministic], name: str
) -> None:
    torch.manual_seed(0)
    box = BOXES[name]
    actor = kind(box)
    distribution = actor.distribution
    size = distribution.num_params if kind is Stochastic else distribution.num_features
    for epsilon in (0.0, 1.0):
        actor.epsilon.fill_(epsilon)
        check_learnable(name, box, actor.choose_each(torch.zeros(N, size), "explore").action)
        for mode in MODES:
            executed(box, actor.choose_each(30 * torch.randn(N, size), mode).action)


def test_bounds_of_some_entries_do_not_change_the_others() -> None:
    """A Box of mixed entries has, entry by entry, the density of a Box of one entry."""
    torch.manual_seed(0)
    box = BOXES["mixed"]
    ours = Gaussian(box)
    params = torch.randn(N, ours.num_params)
    action = ours.sample(params)
    parts = [Gaussian(Box(*bounds, ())) for bounds in zip(box.low, box.high, strict=True)]  # type: ignore[arg-type]
    own = [params[:, index :: len(parts)] for index in range(len(parts))]
    pairs = list(zip(parts, own, action.unbind(-1), strict=True))
    alone = torch.stack([part.log_prob(p, a) for part, p, a in pairs]).sum(0)
    torch.testing.assert_close(ours.log_prob(params, action), alone, rtol=1e-4, atol=1e-3)
    alone = torch.stack([part.entropy(p) for part, p, _ in pairs]).sum(0)
    torch.testing.assert_close(ours.entropy(params), alone, rtol=1e-4, atol=1e-3)


def test_constants_of_a_box_are_copied_to_a_device_once() -> None:
    """A copy from the host waits for the device, and ends the recording of a CUDA graph."""
    distribution = SquashedGaussian(BOXES["finite"])
    actions = torch.zeros(N, 2, device="meta")
    with torch.inference_mode():
        distribution.in_box(distribution.features(actions))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", None)
        distribution.features(actions)
    # Training uses them too, so they may not be inference tensors.
    distribution.in_box(torch.zeros(N, 2, device="meta", requires_grad=True))
