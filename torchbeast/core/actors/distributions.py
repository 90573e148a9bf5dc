# SPDX-License-Identifier: Apache-2.0
"""Distributions over actions: what a policy's parameters mean for an action space.

    Discrete       categorical                                  n parameters (logits)
    MultiDiscrete  independent categoricals                     sum(nvec) parameters (logits)
    Box, integer   likewise, one categorical for each entry
    MultiBinary    independent coins                            one parameter per entry (logit)
    Box            Gaussian with independent entries,           two parameters per entry: all means,
                   or SquashedGaussian on request               then all logs of deviations
    tuple, dict    the independent parts, dict keys sorted      the parts', in that order

A logit of -inf rules a choice out: it is never sampled, and adds nothing to entropy, KL or their
gradients.

Parameters are ONE float tensor [..., num_params], "policy_logits"; an action is a nest of tensors
[..., *shape] as the environment takes it. The leading dimensions are any, mostly [T, B]. Parameters
come and go as tensors only, so that they can travel in rollouts; a distribution object holds no
state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchbeast.core.base.nest import Nest, flatten, pack_as
from torchbeast.core.envs import spaces
from torchbeast.errors import UsageError, as_usage_error

# The range of a Gaussian's log deviation, in units of half the box.
_LOG_STD_RANGE = (-5.0, 2.0)
# Largest value of tanh here: the largest float32 below 1, whose inverse is 8.7.
_LARGEST_TANH = 1.0 - 2.0**-24
# Points and half width, in deviations, of the trapezoidal rule under a normal density. At the
# largest deviation an entropy is off by a thousandth, at 4 by a hundred-thousandth.
_NODES, _NODES_WITHIN = 48, 5.5
# The largest number of joint actions whose probabilities are computed one by one.
MOST_ACTIONS = 1024


class ActionDistribution(ABC):
    """Base class of the distributions over one action space, for params of any leading shape.

    Attributes:
        num_params: Size of the last dimension of params.
        num_features: Size of the last dimension of features().
        num_actions: Number of (joint) actions; None if they are continuous.
        deviations: Whether each of the params is the log of a deviation. Only built-in networks
            need it.
    """

    num_params: int
    num_features: int
    num_actions: int | None = None
    deviations: list[bool]

    @abstractmethod
    def sample(self, params: Tensor) -> Nest[Tensor]:
        """Draws an action for each row of params [..., num_params], by torch's global generator."""

    @abstractmethod
    def mode(self, params: Tensor) -> Nest[Tensor]:
        """Returns the most likely action for each row of params [..., num_params]."""

    @abstractmethod
    def log_prob(self, params: Tensor, action: Nest[Tensor]) -> Tensor:
        """Returns log pi(action) [...] in nats, a log-density for continuous actions.

        Args:
            params: [..., num_params].
            action: Leaves [..., *shape of an action].
        """

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """Returns the entropy [...] in nats of params [..., num_params]."""

    @abstractmethod
    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """Returns KL(p || q) [...] in nats.

        Args:
            p: [..., num_params].
            q: [..., num_params].
        """

    @abstractmethod
    def zero_action(self, batch_shape: Sequence[int]) -> Nest[Tensor]:
        """Returns valid actions [*batch_shape, ...], as the "last action" before the first one."""

    @abstractmethod
    def features(self, action: Nest[Tensor]) -> Tensor:
        """Returns the action as input of a network, float32 [..., num_features]; choices are
        one-hot.
        """

    def choices(self, params: Tensor) -> list[Tensor]:
        """Returns log-probabilities [..., n] of each of the independent choices of an action.

        Raises:
            NotImplementedError: If actions are not choices.
        """
        raise NotImplementedError(f"{type(self).__name__} actions are continuous")

    def all_log_probs(self, params: Tensor) -> Tensor:
        """Returns log pi(a) [..., num_actions] of every action; of several choices the last changes
        fastest.

        Raises:
            NotImplementedError: Unless `is_enumerable`.
        """
        if not self.is_enumerable:
            raise NotImplementedError(f"{type(self).__name__} actions cannot be enumerated")
        joint, *others = self.choices(params)
        for choice in others:
            joint = (joint.unsqueeze(-1) + choice.unsqueeze(-2)).flatten(-2)
        return joint

    @property
    def is_enumerable(self) -> bool:
        """Whether there are few enough actions for all_log_probs."""
        return self.num_actions is not None and self.num_actions <= MOST_ACTIONS


def distribution_for(
    space: spaces.ActionSpace, over_box: Callable[[spaces.Box], ActionDistribution] | None = None
) -> ActionDistribution:
    """Returns the distribution over an action space.

    Args:
        space: A Discrete, MultiDiscrete, MultiBinary or Box of torchbeast.core.envs.spaces or of
            Gymnasium, or a tuple or dict of them.
        over_box: Makes the distributions over boxes, such as SquashedGaussian, whose actions stay
            inside the box. Default: Gaussian.

    Raises:
        UsageError: For another space.

    Example:
        ```python
        distribution = distribution_for(Discrete(4))
        action = distribution.sample(policy_logits)
        log_prob = distribution.log_prob(policy_logits, action)
        ```
    """
    match space:
        case spaces.Discrete(n, start):
            return Categorical(n, start)
        case spaces.MultiDiscrete(nvec):
            return MultiCategorical(nvec, [0] * len(nvec), (len(nvec),))
        case spaces.Box() if space.is_integer:
            return MultiCategorical(space.nvec, space.start, space.shape)
        case spaces.MultiBinary(shape):
            return Bernoulli(shape)
        case spaces.Box():
            return (over_box or Gaussian)(space)
        case tuple() | dict():
            return Product(space, [distribution_for(part, over_box) for part in flatten(space)])
    if type(space).__module__.startswith("gymnasium."):
        with as_usage_error():
            known = spaces.from_gymnasium(space)
        return distribution_for(known, over_box)
    raise UsageError(f"no distribution for the action space {space!r}")


class Categorical(ActionDistribution):
    """A choice of start, ..., start + n - 1; actions are int64 [...]."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.num_params = self.num_features = self.num_actions = n
        self.deviations = [False] * n
        self.nvec = (n,)
        self._start = start

    def sample(self, params: Tensor) -> Tensor:
        # The argmax of logits with Gumbel noise is a sample of their softmax: no normalisation, no
        # check that waits for the device. -log of an exponential variable is Gumbel noise.
        noise = torch.empty_like(params).exponential_().log_()
        return (params - noise).argmax(-1) + self._start

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1) + self._start

    def log_prob(self, params: Tensor, action: Nest[Tensor]) -> Tensor:
        return self.chosen(params.log_softmax(-1), action)

    def chosen(self, values: Tensor, action: Nest[Tensor]) -> Tensor:
        """Returns the values [...] of actions, of values [..., n] of all actions."""
        return values.gather(-1, self._index(action).unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_probs = params.log_softmax(-1)
        return -_weighted(log_probs, log_probs).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        return _weighted(log_p, log_p - log_q).sum(-1)

    def zero_action(self, batch_shape: Sequence[int]) -> Tensor:
        return torch.full(tuple(batch_shape), self._start, dtype=torch.int64)

    def features(self, action: Nest[Tensor]) -> Tensor:
        index = self._index(action).unsqueeze(-1)
        zeros = torch.zeros((*index.shape[:-1], self.num_features), device=index.device)
        return zeros.scatter_(-1, index, 1.0)  # half the time of one_hot, which has integers

    def choices(self, params: Tensor) -> list[Tensor]:
        return [params.log_softmax(-1)]

    def _index(self, action: Nest[Tensor]) -> Tensor:
        return _leaf(action).long() - self._start


class Joint(ActionDistribution):
    """Independent distributions, whose actions a subclass packs into one."""

    def __init__(self, parts: Sequence[ActionDistribution]) -> None:
        self._parts = parts
        self._sizes = [part.num_params for part in parts]
        self.num_params = sum(self._sizes)
        self.num_features = sum(part.num_features for part in parts)
        counts = [part.num_actions for part in parts]
        self.num_actions = None if None in counts else math.prod(n for n in counts if n is not None)
        self.deviations = [
            is_deviation
            for part in parts  # a user's own need not say it
            for is_deviation in getattr(part, "deviations", [False] * part.num_params)
        ]

    @abstractmethod
    def _pack(self, leaves: list[Any]) -> Nest[Tensor]:
        """Returns the action that consists of these, one for each part."""

    @abstractmethod
    def _leaves(self, action: Nest[Tensor]) -> Sequence[Tensor]:
        """Returns the action of each part."""

    def sample(self, params: Tensor) -> Nest[Tensor]:
        return self._pack([part.sample(own) for part, own in self._zip(params)])

    def mode(self, params: Tensor) -> Nest[Tensor]:
        return self._pack([part.mode(own) for part, own in self._zip(params)])

    def log_prob(self, params: Tensor, action: Nest[Tensor]) -> Tensor:
        pairs = zip(self._zip(params), self._leaves(action), strict=True)
        return _sum([part.log_prob(own, leaf) for (part, own), leaf in pairs])

    def entropy(self, params: Tensor) -> Tensor:
        return _sum([part.entropy(own) for part, own in self._zip(params)])

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        pairs = zip(self._zip(p), self._zip(q), strict=True)
        return _sum([part.kl(own_p, own_q) for (part, own_p), (_, own_q) in pairs])

    def zero_action(self, batch_shape: Sequence[int]) -> Nest[Tensor]:
        return self._pack([part.zero_action(batch_shape) for part in self._parts])

    def features(self, action: Nest[Tensor]) -> Tensor:
        parts = zip(self._parts, self._leaves(action), strict=True)
        return torch.cat([part.features(leaf) for part, leaf in parts], -1)

    def choices(self, params: Tensor) -> list[Tensor]:
        return [choice for part, own in self._zip(params) for choice in part.choices(own)]

    def _zip(self, params: Tensor) -> list[tuple[ActionDistribution, Tensor]]:
        return list(zip(self._parts, torch.split(params, self._sizes, -1), strict=True))


class MultiCategorical(Joint):
    """Independent choices, len(nvec) of them; actions are int64 [..., len(nvec)], or, of an integer
    Box, [..., *shape], with choices from `start` on.
    """

    def __init__(self, nvec: Sequence[int], start: Sequence[int], shape: tuple[int, ...]) -> None:
        super().__init__([Categorical(*pair) for pair in zip(nvec, start, strict=True)])
        self.nvec = tuple(nvec)
        self._shape = shape

    def _pack(self, leaves: list[Any]) -> Tensor:
        return torch.stack(leaves, -1).reshape((*leaves[0].shape, *self._shape))

    def _leaves(self, action: Nest[Tensor]) -> Sequence[Tensor]:
        return _flat(action, self._shape).unbind(-1)


class Bernoulli(ActionDistribution):
    """Independent zeros and ones; actions are int8 [..., *shape]."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self.num_params = self.num_features = math.prod(shape)
        self.num_actions = 2**self.num_params
        self.deviations = [False] * self.num_params

    def sample(self, params: Tensor) -> Tensor:
        return self._action(torch.rand_like(params) < params.sigmoid())

    def mode(self, params: Tensor) -> Tensor:
        return self._action(params > 0)

    def log_prob(self, params: Tensor, action: Nest[Tensor]) -> Tensor:
        signs = 2.0 * self.features(action) - 1.0
        return F.logsigmoid(signs * params).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_probs = _of_both_sides(params)
        return -_weighted(log_probs, log_probs).sum((-2, -1))

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = _of_both_sides(p), _of_both_sides(q)
        return _weighted(log_p, log_p - log_q).sum((-2, -1))

    def zero_action(self, batch_shape: Sequence[int]) -> Tensor:
        return torch.zeros((*batch_shape, *self._shape), dtype=torch.int8)

    def features(self, action: Nest[Tensor]) -> Tensor:
        return _flat(action, self._shape).float()

    def choices(self, params: Tensor) -> list[Tensor]:
        return list(_of_both_sides(params).flip(-1).unbind(-2))

    def _action(self, ones: Tensor) -> Tensor:
        return ones.to(torch.int8).reshape((*ones.shape[:-1], *self._shape))


class _OnDevices(dict[torch.device, tuple[Tensor, ...]]):
    """Constants by device, copied to each device once: a copy from the host waits for the device,
    and cannot be recorded in a CUDA graph.
    """

    def __missing__(self, device: torch.device) -> tuple[Tensor, ...]:
        (constants, *_) = self.values()
        with torch.inference_mode(False):  # training uses them too
            self[device] = tuple(each.to(device) for each in constants)
        return self[device]


class Gaussian(ActionDistribution):
    """Independent normal entries; actions [..., *shape] in the box's dtype.

    The mean and the deviation are in units of the box: 0 is its centre and 1 half its width. An
    entry without usable bounds (see `_units`) has the width 2, and its centre is the point of the
    box that is nearest to 0. Samples are not clipped to the box, so that their log-probability
    stays the Gaussian's: the environment clips what it executes.
    """

    def __init__(self, box: spaces.Box) -> None:
        self._dtype = getattr(torch, box.dtype)
        self._shape = box.shape
        centre, scale, self._is_bounded = _units(box)
        self._units = _OnDevices({centre.device: (centre, scale, scale.log())})
        self.num_features = math.prod(box.shape)
        self.num_params = 2 * self.num_features
        self.deviations = [False] * self.num_features + [True] * self.num_features

    def sample(self, params: Tensor) -> Tensor:
        return self._action(_normal(*_mean_and_log_std(params)))

    def mode(self, params: Tensor) -> Tensor:
        return self._action(_mean_and_log_std(params)[0])

    def log_prob(self, params: Tensor, action: Nest[Tensor]) -> Tensor:
        mean, log_std = _mean_and_log_std(params)
        z = (self.features(action) - mean) / log_std.exp()
        log_scale = self._log_scale(z)
        return (-0.5 * z.square() - log_std - log_scale - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        log_std = _mean_and_log_std(params)[1]
        return (log_std + self._log_scale(log_std) + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        (mean_p, log_p), (mean_q, log_q) = _mean_and_log_std(p), _mean_and_log_std(q)
        squares = (2 * log_p).exp() + (mean_p - mean_q).square()
        return (log_q - log_p + 0.5 * squares * (-2 * log_q).exp() - 0.5).sum(-1)

    def zero_action(self, batch_shape: Sequence[int]) -> Tensor:
        return self._action(torch.zeros((*batch_shape, self.num_features)))

    def features(self, action: Nest[Tensor]) -> Tensor:
        flat = _flat(action, self._shape).float()
        centre, scale, _ = self._units[flat.device]
        return (flat - centre) / scale

    def _action(self, units: Tensor) -> Tensor:
        centre, scale, _ = self._units[units.device]
        flat = units * scale + centre
        return flat.to(self._dtype).reshape((*units.shape[:-1], *self._shape))

    def _log_scale(self, other: Tensor) -> Tensor:
        return self._units[other.device][2]


class SquashedGaussian(Gaussian):
    """The tanh of independent normal entries, scaled to the box: no action leaves it (Haarnoja et
    al. 2018, arXiv 1801.01290, appendix C).

        u ~ Normal(mean, deviation)        action = centre + scale * tanh(u)
        log pi(action) = log Normal(u) - log scale - log(1 - tanh(u)^2)

    An action determines its u only to the precision of float32. Within 1e-6 of a bound (in half
    widths) the u that `log_prob` computes is off by some hundredths, and on the bound it is taken
    as 8.7; `rsample` knows u. Ratios of two policies are hardly affected, since both use the same
    u. kl is exact: it is the Gaussians' KL. The entropy has no closed form; the trapezoidal
    rule over u gives it to 2e-3 nats, deterministic and differentiable. The mode is the action of
    the mean, which half of the samples lie below, entry by entry; with large deviations the density
    is higher next to the bounds.

    Attributes:
        log_half_widths: The sum of the logs of all half widths: the entropy of an action in units
            of the box is smaller by this.
    """

    def __init__(self, box: spaces.Box) -> None:
        super().__init__(box)
        low, high = torch.tensor(box.bounds, dtype=self._dtype)
        self._bounds = _OnDevices({low.device: (low, high)})
        self.log_half_widths = float(self._log_scale(low).sum())
        if not self._is_bounded.all():
            entry = int(self._is_bounded.int().argmin())
            low, high = low.flatten()[entry], high.flatten()[entry]
            raise UsageError(
                "SAC and TD3 need low below high in every entry of a Box of actions, and both "
                f"within {_largest_bound(box):,.0f}, got {low:g} and {high:g} in entry {entry}: "
                "declare the actual bounds, or use impala or ppo"
            )

    def rsample(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a sample [..., *shape] and its log-density [...], differentiable in params."""
        u = _normal(*_mean_and_log_std(params))
        return self._action(u), self._log_density(params, u)

    def log_prob(self, params: Tensor, action: Nest[Tensor]) -> Tensor:
        squashed = self.features(action).clamp(-_LARGEST_TANH, _LARGEST_TANH)
        return self._log_density(params, squashed.atanh())

    def entropy(self, params: Tensor) -> Tensor:
        mean, log_std = _mean_and_log_std(params)
        z = torch.linspace(-_NODES_WITHIN, _NODES_WITHIN, _NODES).to(params)
        weights = (-0.5 * z.square()).softmax(-1)
        u = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * z
        return super().entropy(params) + (_log_slope_of_tanh(u) * weights).sum((-2, -1))

    def in_box(self, units: Tensor) -> Tensor:
        """Returns actions [..., *shape] of units [..., num_features], of which -1 and 1 are the
        bounds, the inverse of `features`; clips.
        """
        return super()._action(units).clamp(*self._bounds[units.device])

    def _log_density(self, params: Tensor, u: Tensor) -> Tensor:
        """Returns the log-density [...] of the action that u [..., num_features] becomes."""
        mean, log_std = _mean_and_log_std(params)
        z = (u - mean) / log_std.exp()
        log_normal = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
        return (log_normal - self._log_scale(u) - _log_slope_of_tanh(u)).sum(-1)

    def _action(self, units: Tensor) -> Tensor:
        """Scales tanh(units) to the box; clips, because rounding may exceed a bound."""
        return self.in_box(units.tanh())


class Product(Joint):
    """Independent distributions in a tuple or dict; actions are nests of that structure."""

    def __init__(self, space: spaces.ActionSpace, parts: Sequence[ActionDistribution]) -> None:
        super().__init__(parts)
        self._space = space

    def _pack(self, leaves: list[Any]) -> Nest[Tensor]:
        return pack_as(self._space, leaves)

    def _leaves(self, action: Nest[Tensor]) -> Sequence[Tensor]:
        return flatten(action)


def _leaf(action: Nest[Tensor]) -> Tensor:
    assert isinstance(action, Tensor)
    return action


def _flat(action: Nest[Tensor], shape: tuple[int, ...]) -> Tensor:
    """[..., *shape] as [..., prod(shape)]."""
    leaf = _leaf(action)
    leading = leaf.shape[: leaf.dim() - len(shape)]
    return leaf.reshape(*leading, math.prod(shape))


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _weighted(log_probs: Tensor, values: Tensor) -> Tensor:
    """Each value times its probability; 0 where that is 0, whatever the value."""
    return log_probs.exp() * values.masked_fill(log_probs.isneginf(), 0.0)


def _of_both_sides(params: Tensor) -> Tensor:
    """[..., n] logits of coins as [..., n, 2] log-probabilities of 1 and 0."""
    return F.logsigmoid(torch.stack([params, -params], -1))


def _mean_and_log_std(params: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = params.chunk(2, -1)
    return mean, _Bounded.apply(log_std, *_LOG_STD_RANGE)  # type: ignore[no-untyped-call]


def _normal(mean: Tensor, log_std: Tensor) -> Tensor:
    """A sample with its gradient to both."""
    return mean + log_std.exp() * torch.randn_like(mean)


def _log_slope_of_tanh(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), also where that rounds to 0."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


class _Bounded(torch.autograd.Function):
    """A clamp whose values come back.

    A plain clamp has no gradient outside: a deviation that one large update carries there would
    stay for good. With the gradient in both directions an entropy bonus would carry it further out
    without end, and back it would have the same way to go. So only what moves a value back passes,
    under a loss that is minimised. Between the bounds nothing differs from a clamp.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: float, high: float) -> Tensor:
        bounded = values.clamp(low, high)
        ctx.save_for_backward(values - bounded)
        return bounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (outside,) = ctx.saved_tensors
        return gradient.masked_fill(outside * gradient < 0, 0.0), None, None


def _units(box: spaces.Box) -> tuple[Tensor, Tensor, Tensor]:
    """Returns centre, half width and whether there are usable bounds of each entry [prod(shape)].

    Bounds are usable where neither is beyond `_largest_bound`, and float32 can tell them apart and
    hold half the width.
    """
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (box.low, box.high))
    largest, half = _largest_bound(box), (high - low) / 2
    is_bounded = (low.abs() <= largest) & (high.abs() <= largest)
    is_bounded &= (low.float() < high.float()) & (half >= torch.finfo(torch.float32).tiny)
    nearest = torch.zeros_like(low).clamp(low, high).clamp(-largest, largest)
    centre = torch.where(is_bounded, (low + high) / 2, nearest)
    return centre.float(), torch.where(is_bounded, half, 1.0).float(), is_bounded


def _largest_bound(box: spaces.Box) -> float:
    """Returns 1/eps, 8,388,608 in float32; larger bounds are not used for scaling.

    Beyond it neighbouring numbers are 1 or more apart, so a policy in units of that box could
    not choose an ordinary action. People write such bounds to say that actions are unbounded.
    """
    return 1.0 / max(torch.finfo(getattr(torch, box.dtype)).eps, torch.finfo(torch.float32).eps)
