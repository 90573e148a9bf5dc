# SPDX-License-Identifier: Apache-2.0
"""Settings of the default algorithm, and of the optimiser step that all share.

They are kept apart from the code that uses them, which imports torch: the command line is read
first, so that a wrong flag is reported at once and servers start while torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from torchbeast.core.checks import above, at_least, between, one_of
from torchbeast.core.choices import RewardClipping

if TYPE_CHECKING:
    from torch import nn

    from torchbeast.core.algos.rmsprop import RMSprop


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Limits of one step of an optimiser."""

    warmup_steps: int = 0
    """Steps over which the learning rate grows from 0 at first. RMSprop's average starts at 0: with
    a small --epsilon the first updates are up to ten times as large as later ones, and can
    silence a network for good."""
    grad_norm_clipping: float = 40.0
    """Largest norm of a gradient."""

    def __post_init__(self) -> None:
        at_least(0, warmup_steps=self.warmup_steps)
        above(0, grad_norm_clipping=self.grad_norm_clipping)


@dataclass(frozen=True, kw_only=True)
class RMSpropConfig:
    """RMSprop, PyTorch's (epsilon is added outside the root)."""

    learning_rate: float = 0.00048
    """It falls linearly from this to 0 at --total_steps."""
    alpha: float = 0.99
    """Smoothing of the squared gradient."""
    momentum: float = 0.0
    """Momentum."""
    epsilon: float = 0.01
    """Added to the root of the squared gradient."""

    def __post_init__(self) -> None:
        above(0, learning_rate=self.learning_rate, epsilon=self.epsilon)
        at_least(0, alpha=self.alpha, momentum=self.momentum)

    def make(self, parameters: Iterable[nn.Parameter]) -> RMSprop:
        """Returns an optimiser of these parameters."""
        from torchbeast.core.algos.rmsprop import RMSprop  # imports torch

        return RMSprop(
            parameters,
            lr=self.learning_rate,
            alpha=self.alpha,
            eps=self.epsilon,
            momentum=self.momentum,
        )


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig:
    """IMPALA's loss and optimiser."""

    discounting: float = 0.99
    """Discount of a reward one step later."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this in the loss (never in the logs), before they are clipped.
    Learning works best with returns of about one."""
    reward_clipping: Literal["auto", RewardClipping] = "auto"
    """abs_one: rewards are clamped to [-1, 1] in the loss (never in the logs). none: they are
    used unchanged. The network sees them clamped too, or else as sign(r) log(1 + |r|).
    auto: abs_one for Atari games, none elsewhere; abs_one also with servers of the original
    TorchBeast, which do not say what they serve."""
    entropy_cost: float = 0.0006
    """Weight of the entropy bonus: more keeps exploring longer."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    optimiser: RMSpropConfig = field(default_factory=RMSpropConfig)

    def __post_init__(self) -> None:
        between(0, 1, discounting=self.discounting)
        above(0, reward_scale=self.reward_scale)
        one_of(("auto", *get_args(RewardClipping)), reward_clipping=self.reward_clipping)
        at_least(0, entropy_cost=self.entropy_cost, baseline_cost=self.baseline_cost)


@dataclass(frozen=True, kw_only=True)
class LaserConfig(ImpalaConfig):
    """LASER's loss and optimiser: IMPALA's, with a trust region for replayed states."""

    replay_kl_threshold: float = 0.1
    """Replayed states are learnt from where the KL divergence between the policy and the implied
    policy, which V-trace evaluates there instead, is at most this, in nats. inf: everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, replay_kl_threshold=self.replay_kl_threshold)
