# SPDX-License-Identifier: Apache-2.0
"""Settings of the default algorithm, and of the optimiser step that all share.

They are kept apart from the code that uses them, which imports torch: the command line is read
first, so that a wrong flag is reported at once and servers start while torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from torchbeast.core.base.checks import above, at_least, between, one_of, require
from torchbeast.core.base.specs import RewardClipping

if TYPE_CHECKING:
    from torch import nn

    from torchbeast.core.algos.optimisers import Foreach

OTHER_NAMES = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "gamma": "discounting",
    "entropy_coef": "entropy_cost",
    "value_loss_coef": "baseline_cost",
    "max_grad_norm": "grad_norm_clipping",
    "tau": "target_rate",
    "initial_alpha": "temperature",
}
"""The names of flags, by other names of the same hyperparameters."""


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
class OptimiserConfig:
    """The optimiser: RMSprop, Adam or AdamW as PyTorch computes them."""

    optimiser: Literal["rmsprop", "adam", "adamw"] = "rmsprop"
    """adam and adamw want a smaller --epsilon, such as 0.00001. A run that is resumed keeps its
    optimiser."""
    learning_rate: float = 0.00048
    """It falls linearly from this to 0 at --total_steps."""
    epsilon: float = 0.01
    """Added to the root of the squared gradient (outside it)."""
    alpha: float = 0.99
    """Smoothing of the squared gradient by rmsprop."""
    momentum: float = 0.0
    """Momentum of rmsprop."""
    beta1: float = 0.9
    """Smoothing of the gradient by adam and adamw."""
    beta2: float = 0.999
    """Smoothing of the squared gradient by adam and adamw."""
    weight_decay: float = 0.0
    """Share of the weights that adamw subtracts in every step, times the learning rate."""

    def __post_init__(self) -> None:
        one_of(("rmsprop", "adam", "adamw"), optimiser=self.optimiser)
        above(0, learning_rate=self.learning_rate, epsilon=self.epsilon)
        at_least(0, alpha=self.alpha, momentum=self.momentum, weight_decay=self.weight_decay)
        for name, beta in {"beta1": self.beta1, "beta2": self.beta2}.items():
            require(0 <= beta < 1, f"{name} must be at least 0 and below 1, got {beta}")
        self._check_is_used("momentum", self.momentum, "rmsprop")
        self._check_is_used("weight_decay", self.weight_decay, "adamw")

    def _check_is_used(self, name: str, value: float, by: str) -> None:
        require(
            not value or self.optimiser == by,
            f"{name} {value:g} is for optimiser {by}, got {self.optimiser}: leave it out, or "
            f"choose {by}",
        )

    def make(self, parameters: Iterable[nn.Parameter]) -> Foreach:
        """Returns an optimiser of these parameters."""
        from torchbeast.core.algos.optimisers import Adam, RMSprop  # these import torch

        rates = {"lr": self.learning_rate, "eps": self.epsilon}
        if self.optimiser == "rmsprop":
            return RMSprop(parameters, alpha=self.alpha, momentum=self.momentum, **rates)
        betas = self.beta1, self.beta2
        return Adam(parameters, betas=betas, weight_decay=self.weight_decay, **rates)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How rewards are learnt from."""

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

    def __post_init__(self) -> None:
        between(0, 1, discounting=self.discounting)
        above(0, reward_scale=self.reward_scale)
        one_of(("auto", *get_args(RewardClipping)), reward_clipping=self.reward_clipping)


@dataclass(frozen=True, kw_only=True)
class IMPALAConfig(RewardConfig):
    """IMPALA's loss and optimiser."""

    entropy_cost: float = 0.0006
    """Weight of the entropy bonus: more keeps exploring longer."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    normalise_returns: bool = False
    """Divide rewards in the loss (never in the logs) by the running deviation of their discounted
    sums, and clip them to 10; for rewards of unknown scale."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, entropy_cost=self.entropy_cost, baseline_cost=self.baseline_cost)
        require(
            not (self.normalise_returns and self.reward_clipping == "abs_one"),
            "normalise_returns scales rewards by their returns, and reward_clipping abs_one clamps "
            "them to [-1, 1]: leave out the first, or give reward_clipping none",
        )


@dataclass(frozen=True, kw_only=True)
class LASERConfig(IMPALAConfig):
    """LASER's loss and optimiser: IMPALA's, with a trust region for replayed states."""

    replay_kl_threshold: float = 0.1
    """Replayed states are learnt from where the KL divergence between the policy and the implied
    policy, which V-trace evaluates there instead, is at most this, in nats. inf: everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, replay_kl_threshold=self.replay_kl_threshold)


_ADAM_OF_PPO = OptimiserConfig(optimiser="adam", learning_rate=0.00025, epsilon=0.00001)
_ADAM = OptimiserConfig(optimiser="adam", learning_rate=0.0003, epsilon=0.00000001)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(IMPALAConfig):
    """PPO's loss and optimiser. Losses are means over a minibatch, not sums."""

    num_epochs: int = 4
    """Times that each batch is learnt from."""
    num_mini_batch: int = 4
    """Minibatches of an epoch, with an optimiser step each: shuffled steps, or with a recurrent
    network whole rollouts."""
    clip_param: float = 0.2
    """Once the ratio of an action's new and old probability is further than this from 1, in the
    direction in which the advantage pushes it, the action adds no gradient. The ratio has no other
    bound."""
    use_clipped_value_loss: bool = False
    """Clip values as well: the loss is the larger one of the value's and of the same value clipped
    to within --clip_param of what it was before the first epoch. Only for returns of about one
    (--reward_scale, --normalise_returns): values cannot follow larger ones."""
    gae_lambda: float = 0.95
    """Decay of the errors that an advantage adds up: 0 takes the first alone, 1 all until the
    rollout's end."""
    normalise_advantages: bool = True
    """Give the advantages of each minibatch mean 0 and deviation 1."""
    target_kl: float | None = None
    """Leave out the rest of a batch's minibatches after one whose mean KL divergence from the
    policy that acted was above this, in nats. Default: leave out none."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus, a mean over the steps: more keeps exploring longer."""
    optimiser: OptimiserConfig = _ADAM_OF_PPO

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, num_epochs=self.num_epochs, num_mini_batch=self.num_mini_batch)
        above(0, clip_param=self.clip_param, target_kl=self.target_kl)
        between(0, 1, gae_lambda=self.gae_lambda)


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(RewardConfig):
    """The settings that DQN, SAC and TD3 have in common. Losses are means over a batch."""

    target_rate: float = 0.005
    """Share of the way that target networks go to the learnt ones at a time."""
    target_period: int = 1
    """Optimiser steps from one such time to the next."""
    optimiser: OptimiserConfig = _ADAM

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, target_rate=self.target_rate)
        between(0, 1, target_rate=self.target_rate)
        at_least(1, target_period=self.target_period)


@dataclass(frozen=True, kw_only=True)
class DQNConfig(OffPolicyConfig):
    """Double DQN's loss, exploration and optimiser."""

    double_dqn: bool = True
    """Let the learnt network choose the actions that the target network rates. Otherwise the
    latter does both, and rates too high."""
    exploration_steps: int = 10_000
    """Environment steps over which the share of random actions falls from 1 to --epsilon_end."""
    epsilon_end: float = 0.05
    """The share of random actions afterwards."""
    target_rate: float = 1.0
    """Share of the way that the target network goes to the learnt one at a time; 1: a copy."""
    target_period: int = 500
    """Optimiser steps from one copy of the learnt network to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, exploration_steps=self.exploration_steps)
        between(0, 1, epsilon_end=self.epsilon_end)


@dataclass(frozen=True, kw_only=True)
class SACConfig(OffPolicyConfig):
    """SAC's losses, temperature and optimisers, which have the same settings."""

    temperature: float = 1.0
    """Weight of the policy's entropy at first; that of all steps with --no_learn_temperature."""
    learn_temperature: bool = True
    """Change the temperature so that the policy's mean entropy comes to --target_entropy."""
    target_entropy: float | None = None
    """In nats; over a Box of actions in units of the box. Default: minus the number of entries of
    an action, and 0.98 log(n) with n actions to choose from, as in the papers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class TD3Config(OffPolicyConfig):
    """TD3's losses, noise and optimisers, which have the same settings."""

    exploration_noise: float = 0.1
    """Deviation of the noise that is added to actions while collecting, in half widths of the box
    of actions."""
    target_noise: float = 0.2
    """Deviation of the noise that is added to the target policy's actions, likewise."""
    target_noise_clip: float = 0.5
    """Largest such noise."""
    policy_period: int = 2
    """Optimiser steps of the critics for each of the policy, with which the targets move too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(
            0,
            exploration_noise=self.exploration_noise,
            target_noise=self.target_noise,
            target_noise_clip=self.target_noise_clip,
        )
        at_least(1, policy_period=self.policy_period)
