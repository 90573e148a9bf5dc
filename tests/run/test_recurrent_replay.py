# SPDX-License-Identifier: Apache-2.0
"""A learner with an LSTM gives walks of the replay the states that its own network has computed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from learners import impala
from torch import Tensor

from torchbeast.collect.replayed import MixedSource
from torchbeast.core.actors.contract import Agent, ModelInputs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.laser import LASER
from torchbeast.core.base.nest import flatten
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.replay.rollout_replay import RolloutReplay
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.fleets.supervisor import Supervisor

SOON = 30.0
T, B, SPARE, IN_FLIGHT = 4, 2, 3, 2
LENGTH = 14  # of every episode, so that a walk has three windows and more
SPACE = ArraySpec((2,), "float32", low=-1, high=1)  # its scale is known: nothing is standardised
BATCHES = 40
State = list[Tensor]  # leaves [layers, columns, hidden]


class Line:
    """An online source of environments that show the sine and cosine of their step."""

    num_bytes = 0

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._numbers = itertools.count()
        self._is_closed = False

    def start(self, supervisor: Supervisor) -> None:
        supervisor.on_close(self.close)

    def batches(self) -> Iterator[Rollout]:
        while not self._is_closed:
            yield self._batch(next(self._numbers))

    def _batch(self, index: int) -> Rollout:
        """Columns differ by the step that they begin with; the spare ones are garbage."""
        shape = T + 1, B + SPARE
        time = (T * index + torch.arange(T + 1))[:, None] + 5 * torch.arange(B + SPARE)
        is_last = time % LENGTH == 0
        zero_state = self._agent.model.initial_state(B + SPARE)
        return Rollout(
            observation=torch.stack([torch.sin(0.7 * time), torch.cos(0.3 * time)], -1),
            reward=(time % 3).float(),
            done=is_last,
            episode_step=(time.int() - 1) % LENGTH + 1,
            episode_return=torch.zeros(shape),
            action=time % 3,
            extras={"policy_logits": torch.sin(time[..., None] * torch.ones(3))},
            initial_agent_state=zero_state,
            truncated=torch.zeros(shape, dtype=torch.bool),
            episode_end=is_last,
            policy_version=torch.full(shape, index),
            final_observation=torch.zeros(0, 2),
            env_index=torch.arange(B + SPARE).repeat(T + 1, 1),
            rollout_index=torch.full(shape, index),
        )

    def close(self) -> None:
        self._is_closed = True

    def status(self) -> dict[str, float]:
        return {"learner_queue_size": 0}

    def seconds(self) -> dict[str, float]:
        return {}

    def hanging(self) -> str:
        return ""

    def lost_streams(self) -> list[Any]:
        return []

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        raise NotImplementedError


@contextmanager
def mixed(agent: Agent) -> Iterator[MixedSource]:
    fields = RolloutSpec(agent, ("policy_logits",), T).fields()
    source = MixedSource(
        Line(agent),
        RolloutReplay(fields, 300, seed=1),
        batch_size=B,
        spare_columns=SPARE,
        learn_start=0,
        in_flight=IN_FLIGHT,
        initial_state=agent.model.initial_state(1),
    )
    supervisor = Supervisor()
    try:
        source.start(supervisor)
        yield source
    finally:
        supervisor.stop("the test ended")
        assert supervisor.join(SOON) == []
    assert supervisor.failure is None


def learner(agent: Agent, columns_at_once: int) -> OptimiserStep[Any]:
    """Makes a learner whose weights change much in every update."""
    column = (T + 1) * 2 * 4  # bytes of observations
    return impala(agent.model, LASER, learning_rate=0.01, bytes_at_once=columns_at_once * column)


@torch.no_grad()
def after_rows(model: Any, rollout: Rollout, count: int) -> State:
    """The network's state after so many rows, which are given to it one by one."""
    state = rollout.initial_agent_state
    for t in range(count):
        row = slice(t, t + 1)
        inputs = rollout.observation, rollout.reward, rollout.done, rollout.action
        state = model(ModelInputs(*(leaf[row] for leaf in inputs)), state).core_state
    return flatten(state)


@pytest.mark.parametrize("columns_at_once", [B + SPARE, 2])
def test_a_window_begins_with_the_state_after_rows_0_to_t_minus_1_of_the_one_before(
    columns_at_once: int,
) -> None:
    """Computed with the weights of the update that learnt from the one before."""
    torch.manual_seed(0)
    spec = ActorSpec("mlp", {"hidden": 8}, use_lstm=True)
    agent = make_agent(spec, SPACE, Discrete(3), 1)
    step = learner(agent, columns_at_once)
    before: dict[int, tuple[Rollout, State]] = {}  # by lane
    continued = 0
    with mixed(agent) as source:
        for number, rollout in enumerate(itertools.islice(source.batches(), BATCHES)):
            lane = number % IN_FLIGHT
            if rollout.replayed is not None:
                given = flatten(rollout.initial_agent_state)
                for column in range(B, B + SPARE):
                    if rollout.done[0, column]:  # of an episode's first row
                        expected = [torch.zeros(1, 8), torch.zeros(1, 8)]
                    else:
                        last, states = before[lane]
                        seen = last.observation[T, column]
                        assert torch.equal(rollout.observation[0, column], seen), "row T again"
                        expected = [leaf[:, column] for leaf in states]
                        continued += 1
                    for leaf, wanted in zip(given, expected, strict=True):
                        torch.testing.assert_close(leaf[:, column], wanted)
                states = after_rows(agent.model, rollout, T)
                before[lane] = rollout.map(torch.clone), states
            rollout.give_feedback(step.update(rollout).feedback)
    assert continued > BATCHES


def test_states_of_other_rows_and_other_weights_differ() -> None:
    """So that the test above can fail."""
    torch.manual_seed(0)
    agent = make_agent(ActorSpec("mlp", {"hidden": 8}, use_lstm=True), SPACE, Discrete(3), 1)
    step = learner(agent, B + SPARE)
    with mixed(agent) as source:
        for rollout in source.batches():
            if rollout.replayed is not None:
                break
            rollout.give_feedback(step.update(rollout).feedback)
        old = copy.deepcopy(agent.model)
        step.update(rollout)
        right = after_rows(old, rollout, T)
        for wrong in (after_rows(old, rollout, T + 1), after_rows(agent.model, rollout, T)):
            for leaf, other in zip(right, wrong, strict=True):
                assert (leaf - other)[:, B:].abs().max() > 1e-4, (
                    "ten times what assert_close allows"
                )
