# SPDX-License-Identifier: Apache-2.0
"""PopArt: value targets normalised by running statistics of each task, while the outputs of the
value function stay as they are (van Hasselt et al. 2016, arXiv 1602.07714; for many tasks Hessel et
al. 2018, arXiv 1809.04474).

    n = w_i . features + b_i        what the network gives for a state of task i
    V = sigma_i n + mu_i            its value, from which V-trace and GAE compute targets G
    loss of the value               (G - mu_i) / sigma_i - n
    loss of the policy              advantages / sigma_i

    mu_i <- mu_i + beta (mean G - mu_i),    nu_i <- nu_i + beta (mean G^2 - nu_i)
    sigma_i = sqrt(nu_i - mu_i^2), between 1e-4 and 1e6
    w_i <- sigma_i w_i / sigma_i',          b_i <- (sigma_i b_i + mu_i - mu_i') / sigma_i'

beta is the popart_rate of one optimiser step, over the targets of its minibatch. In minibatch t of
a task, counted from 0, it is at least 1 / (t + 2), so that the statistics soon fit. The paper moves
them before the step with the same targets; here they move after it, because the slices and learners
of a minibatch find its targets one by one. So nothing is learnt from the first targets of a task,
whose scale is not known yet: they could saturate the policy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, value_head
from torchbeast.core.algos.unroll import Unrolled
from torchbeast.core.losses import Mean, both, mean
from torchbeast.core.storages.rollout import Rollout

_SMALLEST_DEVIATION, _LARGEST_DEVIATION = 1e-4, 1e6


class Unscaled(nn.Module):
    """The values of networks without PopArt: in units of returns."""

    def values(self, outputs: Tensor, rollout: Rollout) -> Tensor:
        """Returns values [T', B] in units of returns.

        Args:
            outputs: [T', B], what the network gives for the first rows.
            rollout: Rollouts of at least T' rows in B columns, whose tasks count.
        """
        return outputs

    def normal(self, values: Tensor, rollout: Rollout) -> Tensor:
        """Returns the outputs [T', B] of the network that stand for values; see `values`."""
        return values

    def scaled(self, differences: Tensor, rollout: Rollout) -> Tensor:
        """Returns differences of values [T', B], such as advantages, in units of the outputs."""
        return differences

    def known(self, values: Tensor, rollout: Rollout) -> Tensor | None:
        """Returns bool [T', B]: whether there are statistics of the task of these values. None: of
        all.
        """
        return None

    def moments(self, targets: Tensor, rollout: Rollout, mask: Tensor | None) -> dict[str, Mean]:
        """Returns metrics of value targets [T, B], by which `adapt` moves the statistics.

        Args:
            targets: [T, B], in units of returns.
            rollout: Rollouts of T steps in B columns.
            mask: bool [T, B], the targets that count. None: all.
        """
        return {}

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Moves the statistics by the joined metrics of a minibatch."""

    def unrolled(self, outputs: Unrolled, rollout: Rollout) -> Unrolled:
        """Returns what `unroll` found, with values in units of returns.

        Args:
            outputs: Of the network.
            rollout: Rollouts of T steps in B columns.
        """
        values = self.values(outputs.baseline.float(), rollout)
        final_values = self.values(outputs.final_values, rollout)
        final_values = final_values.where(rollout.truncated[1:].bool(), 0.0)
        return outputs._replace(baseline=values, final_values=final_values)


class PopArt(Unscaled):
    """Statistics of the value targets of each task, and the head of the network that they rescale.

    The statistics are parameters that no optimiser trains: like weights, and unlike buffers, they
    stay when a later minibatch of the same batch fails.

    Attributes:
        mean: float64 [tasks], mu.
        deviation: float64 [tasks], sigma.
        minibatches: float64 [tasks], how many the statistics are of.
    """

    def __init__(self, actor: ActorCritic, rate: float) -> None:
        """Begins with mean 0 and deviation 1, which change nothing.

        Args:
            actor: The network; raises UsageError unless it has a value head.
            rate: beta, in [0, 1): 0 leaves the statistics as they are, and learns from all targets.
        """
        super().__init__()
        head = value_head(actor)
        self._heads, self._rate = [head], rate  # in a list: not a part of this module
        begin = torch.zeros(head.out_features, dtype=torch.float64, device=head.weight.device)
        self.mean = nn.Parameter(begin, requires_grad=False)
        self.deviation = nn.Parameter(begin + 1.0, requires_grad=False)
        self.minibatches = nn.Parameter(begin.clone(), requires_grad=False)

    def values(self, outputs: Tensor, rollout: Rollout) -> Tensor:
        mean, deviation = self._statistics(outputs, rollout)
        return deviation * outputs + mean

    def normal(self, values: Tensor, rollout: Rollout) -> Tensor:
        return self._where_known(self._normal(values, rollout), rollout)

    def scaled(self, differences: Tensor, rollout: Rollout) -> Tensor:
        deviation = self._statistics(differences, rollout)[1]
        return self._where_known(differences / deviation, rollout)

    def known(self, values: Tensor, rollout: Rollout) -> Tensor | None:
        return self.minibatches[self._tasks(values, rollout)] > 0 if self._rate else None

    def _where_known(self, values: Tensor, rollout: Rollout) -> Tensor:
        known = self.known(values, rollout)
        return values if known is None else values * known  # NaN stays, and fails

    def _normal(self, values: Tensor, rollout: Rollout) -> Tensor:
        mean, deviation = self._statistics(values, rollout)
        return (values - mean) / deviation

    def _tasks(self, like: Tensor, rollout: Rollout) -> Tensor:
        return rollout.tasks[: len(like)].clamp(0, len(self.mean) - 1)

    def _statistics(self, like: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Returns mean and deviation of the first rows' tasks, in the shape and dtype of `like`."""
        tasks = self._tasks(like, rollout)
        return self.mean.to(like.dtype)[tasks], self.deviation.to(like.dtype)[tasks]

    @torch.no_grad()
    def moments(self, targets: Tensor, rollout: Rollout, mask: Tensor | None) -> dict[str, Mean]:
        """Returns the first two moments of the normalised targets of each task; see Unscaled."""
        normal, tasks = self._normal(targets, rollout), rollout.tasks[1:]
        metrics = {}
        for task in range(len(self.mean)):
            where = both(mask, tasks == task)
            metrics[f"popart_target_{task}"] = mean(normal, where)
            metrics[f"popart_square_{task}"] = mean(normal.square(), where)
        return metrics

    @torch.no_grad()
    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Moves the statistics of the tasks that the minibatch had, and rescales their heads.

        With the moments m1 and m2 of normalised targets, mu moves by sigma beta m1, and the squared
        deviation becomes sigma^2 (1 - beta + beta m2 - (beta m1)^2).
        """
        mean, deviation = self.mean.clone(), self.deviation.clone()
        for task in range(len(mean)):
            if (first := metrics.get(f"popart_target_{task}")) is not None and self._rate:
                rate = max(self._rate, 1.0 / (2.0 + float(self.minibatches[task])))
                step, second = rate * first, metrics[f"popart_square_{task}"]
                square = 1.0 - rate + rate * second - step**2
                mean[task] += deviation[task] * step
                deviation[task] *= square**0.5
                self.minibatches[task] += 1.0
        self.move(mean, deviation.clamp(_SMALLEST_DEVIATION, _LARGEST_DEVIATION))

    @torch.no_grad()
    def move(self, mean: Tensor, deviation: Tensor) -> None:
        """Sets the statistics, float64 [tasks], and keeps `values` of every state as they are."""
        head = self._heads[0]
        weight = head.weight.double() * (self.deviation / deviation).unsqueeze(1)
        bias = (self.deviation * head.bias.double() + self.mean - mean) / deviation
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)
