# SPDX-License-Identifier: Apache-2.0
"""Q-networks: they estimate the value of every action and act epsilon-greedily.

    mode explore   with probability epsilon a uniformly random legal action, else the best one
    mode sample    the best action: the policy that Q-learning learns is deterministic
    mode greedy    the best action

An action whose value is -inf is illegal and is never taken.
"""

from __future__ import annotations

from torch import Tensor

from torchbeast.core.actors.contract import Mode
from torchbeast.core.actors.off_policy import Chosen, OffPolicyActor, uniform_among
from torchbeast.core.distributions import Categorical
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.specs import SpecError


class QNetwork(OffPolicyActor):
    """Estimates the values of the actions of a Discrete space: forward gives q_values float32
    [N, n], -inf for illegal actions. They are its extra.
    """

    def choose_each(self, outputs: Tensor, mode: Mode) -> Chosen:
        """Chooses the best action; in mode explore, with probability epsilon a random legal one."""
        action = self._actions.mode(outputs)
        if mode == "explore":
            action = self.randomly(action, uniform_among(self._actions, outputs))
        return Chosen(action, {"q_values": outputs})

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        """The extra q_values [n]; raises SpecError unless the action space is Discrete."""
        return {"q_values": ArraySpec((self._actions.num_params,), "float32")}

    @property
    def _actions(self) -> Categorical:
        if not isinstance(self.distribution, Categorical):
            kind = type(self.distribution).__name__
            raise SpecError(
                f"{type(self).__name__} needs a Discrete action space, but this one has a {kind} "
                "distribution: use an actor-critic"
            )
        return self.distribution
