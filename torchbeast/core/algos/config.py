# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of the algorithms, and of the optimiser step that all of them share; and their
schedules: how a setting, such as the learning rate, changes over a run.

A setting X of an algorithm's Config has a schedule if the Config has a setting X_schedule too, and
perhaps final_X. `learning_rate`, `entropy_cost` and `clip_param` have them.

The code that uses them imports torch, so they have a module to themselves: the command line is read
before torch is imported. A wrong flag is therefore reported immediately, and environment servers
start while torch is still being imported.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from torchbeast.core.base.checks import (
    Settings,
    above,
    at_least,
    below_one,
    between,
    one_of,
    require,
    setting,
)
from torchbeast.core.base.specs import RewardClipping, SpecError, find_callable

if TYPE_CHECKING:
    from torch import nn

    from torchbeast.core.algos.optimisers import Foreach

Shape = str | Callable[[float], float]
"""The type of a setting X_schedule. Functions get the share of the steps that are done, from 0 to
1, and return the share of the way from final_X (0) to X (1)."""

SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
}
_SUFFIX = "_schedule"

OTHER_NAMES = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "gamma": "discounting",
    "ent_coef": "entropy_cost",
    "entropy_coef": "entropy_cost",
    "value_loss_coef": "baseline_cost",
    "clip_range": "clip_param",
    "clip_coef": "clip_param",
    "clip_vloss": "use_clipped_value_loss",
    "n_epochs": "num_epochs",
    "update_epochs": "num_epochs",
    "num_minibatches": "num_mini_batch",
    "max_grad_norm": "grad_norm_clipping",
    "tau": "target_rate",
    "end_e": "epsilon_end",
    "initial_alpha": "temperature",
    "optimizer": "optimiser",
    "normalize_returns": "normalise_returns",
    "normalize_advantages": "normalise_advantages",
    "norm_adv": "normalise_advantages",
}
"""Flags by the names that their hyperparameters have in other libraries."""


def recorded(config: Any) -> dict[str, Any]:
    """Returns the values of a Config by the names of flags, as the programs record them."""
    return {name: _as_recorded(value) for name, (_, value) in settings_of(config).items()}


def _as_recorded(value: Any) -> Any:
    if callable(value):
        return _shape_name(value)
    is_of_numpy = getattr(value, "shape", None) == ()  # a number
    return value.item() if is_of_numpy else value


def check_recorded(settings: Mapping[str, Any], prefix: str) -> None:
    """Raises UsageError for a setting that a checkpoint cannot hold; prefix: of its name."""
    for name, value in settings.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise SpecError(
                f"{prefix}{name} has a value that JSON cannot represent, {value!r}: make it a "
                "number, string or boolean, or None, or a list, tuple or mapping of these"
            ) from error


def usual_of(config: type, in_pool: bool = False) -> dict[str, Any]:
    """Returns the defaults of shared flags, by name, that an algorithm's Config sets in its class
    attribute `usual`: the programs and `create_factory` use them. The name of another of these
    flags stands for its value.

    in_pool: for pools, which step many environments together: with the attribute `usual_in_pool`.
    """
    of_pool = getattr(config, "usual_in_pool", {}) if in_pool else {}
    return {**getattr(config, "usual", {}), **of_pool}


def settings_of(config: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the annotation and the value of every setting by its name, of Configs within too."""
    settings: dict[str, tuple[Any, Any]] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        own = {entry.name: (entry.type, value)}
        settings |= settings_of(value) if is_dataclass(value) else own
    return settings


ConfigT = TypeVar("ConfigT")


def with_values(config: ConfigT, values: Mapping[str, Any], *, check: bool = False) -> ConfigT:
    """Returns a copy with these values by the names of settings, of Configs within too.

    Args:
        config: A Config.
        values: The values; other names are ignored.
        check: Whether to run the Config's checks. Flags on the command line may still change
            conflicting values, and a setting may reach values at the end of its schedule that it
            cannot start with.
    """
    changed = {}
    for entry in fields(config):  # type: ignore[arg-type]
        value = getattr(config, entry.name)
        if is_dataclass(value):
            changed[entry.name] = with_values(value, values, check=check)
        elif entry.name in values:
            changed[entry.name] = values[entry.name]
    if check:
        return replace(config, **changed)  # type: ignore[type-var]
    copied = copy.copy(config)
    vars(copied).update(changed)
    return copied


@dataclass(frozen=True)
class Schedule:
    """A setting that changes over a run.

    value = final + (initial - final) * shape(share)
    share = (step - start) / (total_steps - start), but at least 0 and at most 1
    """

    initial: float
    shape: Shape = "linear"
    final: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether the value changes."""
        return self.shape != "constant"

    def at(self, step: int, total_steps: int, start: int = 0) -> float:
        """Returns the value of an update that begins after `step` environment steps.

        Raises UsageError if the function of a user cannot be imported, or returns something else
        than a number of at least 0.
        """
        left = total_steps - start
        share = min(1.0, max(0.0, (step - start) / left)) if left > 0 else 1.0
        shape = self.shape
        if isinstance(shape, str):
            shape = SHAPES.get(shape) or find_callable(shape)
        value = shape(share)
        part = float(value) if isinstance(value, Real) else math.nan
        if not 0 <= part < math.inf:
            raise SpecError(
                f"the schedule {_shape_name(self.shape)} must return a number of at least 0, but "
                f"for the fraction {share:g} it returned {value!r}: return 1 for the initial value"
            )
        return self.final + (self.initial - self.final) * part

    def ending(self, total_steps: int) -> str:
        """Returns words about the rest of the run, for its start."""
        if not self.changes:
            return "constant"
        name = _shape_name(self.shape)  # an object need not have a hash
        end = f" to {self.final:g} at" if name in SHAPES else " until"
        return f"{name}{end} step {total_steps:,}"


def _shape_name(shape: Shape) -> str:
    """Returns the name of a shape, with which runs record it."""
    if isinstance(shape, str):
        return shape
    named = shape if hasattr(shape, "__qualname__") else type(shape)
    return f"{named.__module__}:{named.__qualname__}"


def schedules_of(settings: Mapping[str, Any]) -> dict[str, Schedule]:
    """Returns the schedules among settings, by the setting that each of them changes."""
    return {
        name: Schedule(initial, settings[name + _SUFFIX], settings.get(f"final_{name}", 0.0))
        for name, initial in settings.items()
        if name + _SUFFIX in settings
    }


def check_schedules(config: Any) -> None:
    """Raises ValueError for a wrong X_schedule or final_X among the fields of a Config."""
    for name, schedule in schedules_of(vars(config)).items():
        shape, final = schedule.shape, schedule.final
        known = shape in SHAPES or ":" in shape if isinstance(shape, str) else callable(shape)
        require(
            known,
            f"{name}{_SUFFIX} must be {', '.join(SHAPES)}, or a function of the fraction of the "
            f"steps done, as package.module:function, got {shape!r}",
        )
        at_least(0, **{f"final_{name}": final})
        require(
            not final or shape != "constant",
            f"final_{name} {final:g} has no effect if {name}{_SUFFIX} is constant: use linear or "
            f"cosine, or remove final_{name}",
        )


@dataclass(frozen=True, kw_only=True)
class StepConfig(Settings):
    """Update settings common to all algorithms: warm-up, clipping, lag limit."""

    warmup_steps: int = setting(0, bounds=(at_least, 0))
    """Learning-rate warm-up: environment steps over which the rate grows linearly from 0. RMSprop
    with a small --epsilon needs it: its running average starts at 0, so the first updates are up to
    ten times too large and can permanently silence the network."""
    grad_norm_clipping: float = setting(40.0, bounds=(above, 0))
    """Gradient clipping: maximum global norm of the gradient, usually 0.5 (PPO) to 40 (IMPALA)."""
    max_lag: int | None = setting(None, bounds=(at_least, 0))
    """Maximum policy lag in updates. Steps collected with older weights are not trained on (column
    too_old_share of the log), but still count as environment steps and in the running statistics of
    observations and returns. Not for dqn, r2d2, sac and td3, which train on steps of any age.
    Default: no limit."""


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig(Settings):
    """The optimiser: RMSprop, Adam or AdamW, computed as in PyTorch."""

    optimiser: Literal["rmsprop", "adam", "adamw"] = "rmsprop"
    """Optimiser. With adam and adamw use a smaller --epsilon, such as 1e-5. A resumed run keeps its
    optimiser."""
    learning_rate: float = setting(0.00048, bounds=(above, 0))
    """Initial learning rate, usually 1e-4 to 3e-3. If you resume a run with a different rate, it
    applies from the step at which the run resumes."""
    learning_rate_schedule: Shape = "linear"
    """Schedule of the learning rate until --total_steps: constant, linear, cosine, or your own as
    package.module:function. The function takes the fraction of the steps done (0 to 1) and returns
    the position between --final_learning_rate (0) and --learning_rate (1)."""
    final_learning_rate: float = 0.0
    """Learning rate at --total_steps, if its schedule is not constant."""
    epsilon: float = setting(0.01, bounds=(above, 0))
    """Optimiser epsilon, added outside the square root. Larger values give smaller, more uniform
    steps."""
    alpha: float = setting(0.99, bounds=(at_least, 0))
    """Decay of rmsprop's running average of squared gradients, 0.9 to 0.999. Larger values average
    over more steps."""
    momentum: float = setting(0.0, bounds=(at_least, 0))
    """Momentum of rmsprop, 0 to 0.9."""
    beta1: float = setting(0.9, bounds=(below_one,))
    """beta1 of adam and adamw: decay of the running average of gradients (their momentum)."""
    beta2: float = setting(0.999, bounds=(below_one,))
    """beta2 of adam and adamw: decay of the running average of squared gradients."""
    weight_decay: float = setting(0.0, bounds=(at_least, 0))
    """Weight decay of adamw: every step shrinks the weights by this times the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("rmsprop", "adam", "adamw"), optimiser=self.optimiser)
        check_schedules(self)
        self._check_is_used("momentum", self.momentum, "rmsprop")
        self._check_is_used("weight_decay", self.weight_decay, "adamw")

    def _check_is_used(self, name: str, value: float, by: str) -> None:
        require(
            not value or self.optimiser == by,
            f"{name} {value:g} needs optimiser {by}, got {self.optimiser}: remove it, or use {by}",
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
class RewardConfig(Settings):
    """Discounting and scaling of rewards."""

    discounting: float = setting(0.99, bounds=(between, 0, 1))
    """Discount factor gamma, 0.95 to 0.999. Larger values give distant rewards more weight."""
    reward_scale: float = setting(1.0, bounds=(above, 0))
    """Multiply rewards by this in the loss (not in the logs), before they are clipped. Choose it so
    that returns are of order 1, where training works best."""
    reward_clipping: Literal["auto", RewardClipping] = "auto"
    """abs_one: clip rewards to [-1, 1] in the loss and in the network's inputs, but not in the
    logs. none: leave them unchanged; the network sees sign(r) log(1 + |r|). auto: abs_one for Atari
    games, and for servers of the original TorchBeast, which do not report their environment; none
    elsewhere."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)  # even if another base class does not call super()
        check_schedules(self)
        one_of(("auto", *get_args(RewardClipping)), reward_clipping=self.reward_clipping)


@dataclass(frozen=True, kw_only=True)
class IMPALAConfig(RewardConfig):
    """IMPALA (Espeholt et al. 2018): V-trace actor-critic loss and optimiser."""

    # A call of the network then acts in many environments, and an update trains on as many steps.
    usual_in_pool: ClassVar[Mapping[str, Any]] = {"num_envs": 256, "unroll_length": 20}

    entropy_cost: float = setting(0.0006, bounds=(at_least, 0))
    """Entropy bonus coefficient, 0.0005 to 0.05 (losses are sums). Larger values encourage
    exploration."""
    entropy_cost_schedule: Shape = "constant"
    """Schedule of the entropy bonus, like --learning_rate_schedule."""
    final_entropy_cost: float = 0.0
    """Entropy bonus coefficient at --total_steps, if its schedule is not constant."""
    baseline_cost: float = setting(0.5, bounds=(at_least, 0))
    """Coefficient of the value (baseline) loss, usually 0.5."""
    normalise_returns: bool | None = None
    """Divide rewards in the loss (not in the logs) by the running standard deviation of discounted
    returns, and clip them to [-10, 10]. Default: true, unless rewards are clipped, as in Atari
    games, or scaled by --reward_scale."""
    popart: bool = False
    """PopArt: learn values and scale advantages with targets that are normalised by their running
    mean and standard deviation in each task (not in the logs). Rewards are then neither clipped nor
    normalised by default."""
    popart_rate: float = setting(0.01, bounds=(below_one,))
    """PopArt's step size beta: weight of a new minibatch in the running statistics, 0.0003 to 0.1.
    The first steps use a larger weight. The paper uses 0.0003, for much longer runs."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.normalise_returns and self.reward_clipping == "abs_one"),
            "normalise_returns scales rewards by their returns, and reward_clipping abs_one clamps "
            "them to [-1, 1]: remove the first, or use reward_clipping none",
        )
        require(
            not (self.normalise_returns and self.popart),
            "popart and normalise_returns both normalise by the scale of returns: remove one",
        )


@dataclass(frozen=True, kw_only=True)
class LASERConfig(IMPALAConfig):
    """LASER (Schmitt et al. 2019): IMPALA with experience replay and a trust region."""

    replay_kl_threshold: float = setting(0.1, bounds=(above, 0))
    """Trust region b: train on a replayed state only if KL(policy || implied policy), in nats, is
    at most this. V-trace evaluates the implied policy, not the current one. inf: train on all
    states."""


_ADAM_OF_PPO = OptimiserConfig(optimiser="adam", learning_rate=0.001, epsilon=0.00001)
_ADAM = OptimiserConfig(
    optimiser="adam", learning_rate=0.0003, learning_rate_schedule="constant", epsilon=0.00000001
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(IMPALAConfig):
    """PPO (Schulman et al. 2017). Losses are means over a minibatch, not sums."""

    usual: ClassVar[Mapping[str, Any]] = {
        "num_envs": 8,
        "batch_size": "num_envs",  # one rollout of each
        "unroll_length": 128,
        "fixed_lag": 0,
        "grad_norm_clipping": 0.5,
    }
    usual_in_pool: ClassVar[Mapping[str, Any]] = {"num_envs": 64, "unroll_length": 32}

    num_epochs: int = setting(10, bounds=(at_least, 1))
    """Epochs of training on each batch, 3 to 10. More epochs are more sample-efficient, but less
    stable."""
    num_mini_batch: int = setting(4, bounds=(at_least, 1))
    """Minibatches per epoch, each with one optimiser step. They consist of shuffled steps, or of
    whole rollouts if the network is recurrent."""
    clip_param: float = setting(0.2, bounds=(above, 0))
    """Clip range epsilon, 0.1 to 0.3: once the ratio of new to old probability of an action leaves
    [1 - epsilon, 1 + epsilon] in the direction of its advantage, its gradient is 0. This does not
    bound the ratio. Larger values allow larger policy changes per batch."""
    clip_param_schedule: Shape = "constant"
    """Schedule of the clip range, like --learning_rate_schedule."""
    final_clip_param: float = 0.0
    """Clip range at --total_steps, if its schedule is not constant."""
    use_clipped_value_loss: bool = False
    """Clip the value loss too: use the larger of two losses, that of the new value, and that of the
    new value clipped to within --clip_param of the old value. Use it only with returns of order 1
    (--reward_scale, --normalise_returns), because it limits how far values move in one batch."""
    gae_lambda: float = setting(0.95, bounds=(between, 0, 1))
    """Lambda of GAE (Schulman et al. 2016), 0.9 to 1: 0 is the one-step TD error, 1 the Monte Carlo
    return minus the value. Larger values have less bias and more variance."""
    normalise_advantages: bool = True
    """Normalise the advantages of each minibatch to mean 0 and standard deviation 1."""
    target_kl: float | None = setting(None, bounds=(above, 0))
    """Early stopping: skip the rest of a batch once the mean KL divergence, in nats, between the
    policy that acted and the current one exceeds this on a minibatch, usually 0.01 to 0.05.
    Default: no early stopping."""
    entropy_cost: float = 0.01
    """Entropy bonus coefficient, 0 to 0.05 (losses are means). Larger values encourage
    exploration."""
    optimiser: OptimiserConfig = _ADAM_OF_PPO


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(RewardConfig):
    """Settings that DQN, SAC and TD3 have in common. Losses are means over a batch."""

    # They wait for learning, not for environments, so few environments suffice.
    usual: ClassVar[Mapping[str, Any]] = {
        "num_envs": 8,
        "replay_size": 1_000_000,
        "replay_ratio": 256.0,
        "batch_size": 256,
        "learn_start": 5_000,
        "unroll_length": 4,
        "torch_threads": 1,  # these networks are too small to share
    }

    target_rate: float = setting(0.005, bounds=(above, 0))
    """Polyak coefficient tau: target = (1 - tau) * target + tau * online. Larger values are less
    stable."""
    target_period: int = setting(1, bounds=(at_least, 1))
    """Optimiser steps between updates of the target network."""
    optimiser: OptimiserConfig = _ADAM

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 1, target_rate=self.target_rate)


@dataclass(frozen=True, kw_only=True)
class ExplorationConfig(Settings):
    """Epsilon-greedy exploration."""

    exploration_steps: int = setting(10_000, bounds=(at_least, 1))
    """Environment steps over which epsilon-greedy exploration decays from 1 to --epsilon_end."""
    epsilon_end: float = setting(0.05, bounds=(between, 0, 1))
    """Final epsilon: share of random actions after --exploration_steps, 0.01 to 0.1."""
    epsilon_ladder: bool = False
    """One epsilon per environment, as in Ape-X (Horgan et al. 2018): epsilon^1 to epsilon^8, spread
    evenly. --epsilon_end is then the largest of them, usually 0.4."""


@dataclass(frozen=True, kw_only=True)
class PQNConfig(RewardConfig, ExplorationConfig):
    """PQN (Gallici et al. 2024): Q(lambda) on rollouts. Losses are means over a minibatch."""

    usual: ClassVar[Mapping[str, Any]] = {
        "num_envs": 32,
        "batch_size": 32,
        "unroll_length": 32,
        "grad_norm_clipping": 10.0,
    }

    q_lambda: float = setting(0.65, bounds=(between, 0, 1))
    """Lambda of Q(lambda), 0 to 1: 0 is the one-step target, 1 the return until the rollout's last
    row. Larger values propagate rewards faster, with more bias from older policies."""
    num_epochs: int = setting(2, bounds=(at_least, 1))
    """Epochs of training on each batch, 1 to 4."""
    num_mini_batch: int = setting(8, bounds=(at_least, 1))
    """Minibatches of shuffled steps per epoch, each with one optimiser step."""
    optimiser: OptimiserConfig = OptimiserConfig(
        optimiser="adam", learning_rate=0.0005, epsilon=0.00001
    )


@dataclass(frozen=True, kw_only=True)
class DQNConfig(OffPolicyConfig, ExplorationConfig):
    """DQN (Mnih et al. 2015) with double Q-learning (van Hasselt et al. 2016)."""

    usual: ClassVar[Mapping[str, Any]] = {
        **OffPolicyConfig.usual,
        "replay_size": 100_000,
        "replay_ratio": 8.0,
        "batch_size": 32,
        "learn_start": 1_000,
        "n_step": 3,  # CartPole after 100,000 steps, seed 1: 416, and 194 with 1
    }

    double_dqn: bool = True
    """Double Q-learning: the online network selects the next action, the target network evaluates
    it. Otherwise the target network does both, which overestimates values."""
    target_rate: float = 1.0
    """Polyak coefficient tau: target = (1 - tau) * target + tau * online. With 1, the network is
    copied."""
    target_period: int = 500
    """Optimiser steps between updates of the target network. Larger values train more slowly, but
    more stably."""
    huber_delta: float | None = setting(None, bounds=(above, 0))
    """TD errors above this enter the loss linearly (Huber loss), so that rare large errors count
    less; the DQN paper has 1, for rewards clipped to [-1, 1]. Default: none, all are squared."""


@dataclass(frozen=True, kw_only=True)
class R2D2Config(RewardConfig, ExplorationConfig):
    """R2D2 (Kapturowski et al. 2019): double Q-learning with a recurrent network on new and
    replayed rollouts. Losses are means over a batch."""

    usual: ClassVar[Mapping[str, Any]] = {
        "use_lstm": True,
        "num_envs": 16,
        "batch_size": 1,
        "unroll_length": 40,
        "replay_size": 100_000,
        "replay_ratio": 7.0,
        "learn_start": 2_000,
        "n_step": 5,
        "priority_exponent": 0.9,
        "priority_beta": 0.6,
        "grad_norm_clipping": 40.0,
    }

    burn_in: int = setting(20, bounds=(at_least, 0))
    """First steps of a rollout, which only restore the recurrent state from the stored one and are
    not trained on. Below --unroll_length; the paper has 40 of 120."""
    target_period: int = setting(200, bounds=(at_least, 1))
    """Optimiser steps between copies of the network to the target network; the paper has 2,500."""
    discounting: float = 0.997
    """Discount factor gamma, 0.95 to 0.999; the paper has 0.997."""
    reward_clipping: Literal["auto", RewardClipping] = "none"
    """abs_one or auto, as with other algorithms. none: rewards stay, because R2D2 rescales values
    by h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x."""
    epsilon_end: float = 0.4
    """Final epsilon, with --epsilon_ladder of the environment that explores most."""
    epsilon_ladder: bool = True
    """One epsilon per environment, from --epsilon_end to its eighth power."""
    optimiser: OptimiserConfig = OptimiserConfig(
        optimiser="adam", learning_rate=0.0005, learning_rate_schedule="constant", epsilon=0.0001
    )


@dataclass(frozen=True, kw_only=True)
class SACConfig(OffPolicyConfig):
    """SAC (Haarnoja et al. 2018). Policy, critics and temperature use the same optimiser
    settings."""

    temperature: float = setting(1.0, bounds=(above, 0))
    """Initial temperature alpha, the weight of the entropy; fixed with --no_learn_temperature."""
    learn_temperature: bool = True
    """Tune the temperature alpha so that the policy's mean entropy approaches --target_entropy."""
    target_entropy: float | None = None
    """Target entropy in nats (actions of a Box scaled to [-1, 1]). Larger values encourage
    exploration. Default: minus the size of a Box action, 0.98 log(n) for n discrete actions
    (Christodoulou 2019)."""


@dataclass(frozen=True, kw_only=True)
class TD3Config(OffPolicyConfig):
    """TD3 (Fujimoto et al. 2018). Policy and critics use the same optimiser settings."""

    usual: ClassVar[Mapping[str, Any]] = {**OffPolicyConfig.usual, "learn_start": 25_000}

    target_period: int = 1
    """Updates of the policy for each update of the target networks."""
    exploration_noise: float = setting(0.1, bounds=(at_least, 0))
    """Standard deviation of the Gaussian noise added to actions while collecting, in half-widths of
    the action box; 0.1 is usual."""
    target_noise: float = setting(0.2, bounds=(at_least, 0))
    """Standard deviation of the target policy smoothing noise, in half-widths of the action box."""
    target_noise_clip: float = setting(0.5, bounds=(at_least, 0))
    """Clip range c of the target policy smoothing noise, in half-widths of the action box."""
    policy_period: int = setting(2, bounds=(at_least, 1))
    """Policy delay d: critic updates per update of the policy and of the target networks."""
