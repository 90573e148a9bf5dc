# SPDX-License-Identifier: Apache-2.0
"""A batch in which episodes begin one step late is learnt as one in which they begin at once.

The late batch is made from the other one by hand: after the row of an end, whose observation is now
the episode's last, comes a row with the next episode's first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import learners
import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.off_policy import QNetwork
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.laser import LASER
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.algos.pqn import PQN
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.storages.rollout import Rollout

T, B = 6, 3
Make = Callable[..., Rollout]
# Each column has two ends, so that all late columns have the same length.
TERMINATED, TRUNCATED = [(2, 0), (1, 1), (4, 2)], [(4, 0), (2, 1), (5, 2)]


class Recurrent(ActorCritic):
    """A linear recurrent network that sees observations only."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(4 + 2, 2)
        self.policy, self.baseline = nn.Linear(2, 3), nn.Linear(2, 1)

    def initial_state(self, batch_size: int) -> Any:
        return (torch.zeros(1, batch_size, 2),)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        (state,) = core_state
        rows = []
        for observation, done in zip(inputs.observation, inputs.done, strict=True):
            state = state * (1 - done.float())[None, :, None]
            state = self.core(torch.cat([observation, state[0]], -1)).tanh()[None]
            rows.append(state[0])
        core = torch.stack(rows)
        return ModelOutput(self.policy(core), self.baseline(core).squeeze(-1), (state,))


class Flat(Recurrent):
    """The same without a memory."""

    def initial_state(self, batch_size: int) -> Any:
        return ()

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        rows = torch.cat([inputs.observation, torch.zeros(*inputs.reward.shape, 2)], -1)
        core = self.core(rows).tanh()
        return ModelOutput(self.policy(core), self.baseline(core).squeeze(-1), ())


def late(rollout: Rollout) -> Rollout:
    """Returns the batch as environments give it that begin episodes one step late."""
    parts = rollout.tensors()
    no_rows = ("final_observation", "initial_agent_state", "valid", "replayed")
    rows = {name: nest for name, nest in parts.items() if name not in no_rows}
    columns = [_late_column(rows, column) for column in range(rollout.batch_size)]
    joined = {name: _joined([column[name] for column in columns]) for name in rows}
    return dataclasses.replace(rollout, **joined)


def _late_column(rows: dict[str, Any], column: int) -> list[dict[str, Any]]:
    found: dict[str, list[Any]] = {name: [] for name in rows}
    for t in range(T + 1):
        here = {name: map_leaves(lambda leaf, t=t: leaf[t, column], rows[name]) for name in rows}
        is_end = t > 0 and bool(here["done"])
        if is_end:  # the last observation of the episode, which nothing may read
            last = here | {"observation": torch.full_like(here["observation"], 1e6)}
            _append(found, last)
            nothing = {name: torch.zeros_like(here[name]) for name in ("reward", "episode_return")}
            no_flags = {name: torch.tensor(False) for name in ("truncated", "episode_end")}
            step = {"episode_step": torch.zeros_like(here["episode_step"])}
            ignored = {"extras": map_leaves(lambda leaf: leaf + 1e6, here["extras"])}
            here = here | nothing | no_flags | step | ignored
        _append(found, here)
    return found  # type: ignore[return-value]


def _append(found: dict[str, list[Any]], row: dict[str, Any]) -> None:
    for name, nest in row.items():
        found[name].append(nest)


def _joined(columns: list[list[Any]]) -> Any:
    """Joins rows of columns to leaves [T+1, B, ...]."""
    if isinstance(columns[0][0], dict):
        return {
            name: _joined([[row[name] for row in column] for column in columns])
            for name in columns[0][0]
        }
    return torch.stack([torch.stack(column) for column in columns], 1)


def gradients(step: Any, rollout: Rollout) -> dict[str, Tensor]:
    step.update(rollout)
    return {name: p.grad for name, p in step.algo.actor.named_parameters()}


@pytest.mark.parametrize("net", [Flat, Recurrent])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (IMPALA, {}),
        (IMPALA, {"normalise_returns": True, "reward_clipping": "none"}),
        (LASER, {}),
        (PPO, {"num_mini_batch": 1}),
        (PPO, {"num_epochs": 2, "num_mini_batch": 1}),
    ],
)
def test_gradients_are_the_same(
    make_rollout: Make, net: type[Recurrent], make: Any, settings: dict[str, Any]
) -> None:
    assert_same_gradients(make_rollout, net(), make, settings)


class Values(QNetwork):
    """A linear Q-network."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, observation: Any) -> Tensor:
        return self.linear(observation)


def test_gradients_of_pqn_are_the_same(make_rollout: Make) -> None:
    assert_same_gradients(make_rollout, Values(), PQN, {"num_mini_batch": 1})


def assert_same_gradients(
    make_rollout: Make, actor: Any, make: Any, settings: dict[str, Any]
) -> None:
    state = actor.initial_state(B)
    rollout = make_rollout(T, B, terminated=TERMINATED, truncated=TRUNCATED, state=state)
    steps = torch.randint(1, 100, rollout.done.shape, dtype=torch.int32)
    rollout = dataclasses.replace(rollout, episode_step=steps)
    lates = late(rollout).without_resets()
    assert lates.num_steps == lates.env_steps == rollout.num_steps == T * B
    assert sorted(lates.finished_episodes()[0]) == sorted(rollout.finished_episodes()[0])
    assert len(lates.reward) == T + 3
    builder = learners.ppo if make is PPO else learners.impala
    one, other = (builder(copy.deepcopy(actor), make, **settings) for _ in range(2))
    found, expected = gradients(one, lates), gradients(other, rollout)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_without_reset_rows_stays_as_it_is(make_rollout: Make) -> None:
    rollout = make_rollout(T, B, terminated=[(0, 0)])
    rollout.episode_step[0, 0] = 0  # the first row of an environment is no step
    rollout.episode_step[1:] += 1
    assert rollout.without_resets() is rollout
