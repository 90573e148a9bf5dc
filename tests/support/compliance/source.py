# SPDX-License-Identifier: Apache-2.0
"""The compliance suite of sources of rollouts.

Inherit and say how to start one:

    class TestMySource(SourceCompliance):
        @contextmanager
        def running(self, setup): ... yield Running(...) ...

The environments are those of source_envs.py, of which every number is known.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from assorted import check_rollout
from background import Background, wait_for
from source_envs import SCHEDULES, reward_of
from torch import Tensor, nn

from torchbeast import envs
from torchbeast.collect.contract import ACTOR_STAGES, LearnerInfo
from torchbeast.core.actors.contract import Agent, Mode, ModelInputs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2
from torchbeast.core.base.specs import ActorSpec, RewardClipping
from torchbeast.core.envs import spaces
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.diagnosis import alive

LATE = 120.0  # seconds; processes may have to start first
COUNTING = "source_models:CountingNet"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The environment, network and sizes of a case."""

    env_id: str
    model: str = COUNTING
    use_lstm: bool = False
    reward_input: RewardClipping = "abs_one"  # of the model
    reads_values: bool = True  # likewise
    num_envs: int = 2
    num_groups: int = 1  # of environments that are stepped together: processes, streams
    batch_size: int = 2
    unroll_length: int = 5
    seed: int = 3
    version: int = 7  # of the first weights
    extras: tuple[str, ...] = ("policy_logits", "baseline")  # that travel
    mode: Mode = "sample"
    described_as: str | None = None  # an environment with the same spaces that can be made

    def actor(self) -> ActorSpec:
        return ActorSpec(
            self.model,
            use_lstm=self.use_lstm,
            reward_input=self.reward_input,
            reads_values=self.reads_values,
        )

    def learner(self, make_weights: Callable[[nn.Module, int], Any], **changes: Any) -> LearnerInfo:
        """Returns what the source of a learner is given."""
        torch.manual_seed(0)
        agent = make_agent(self.actor(), *self.spaces())
        usual = {
            "rollouts": RolloutSpec(agent, self.extras, self.unroll_length),
            "batch_size": self.batch_size,
            "weights": make_weights(agent.model, self.version),
            "device": torch.device("cpu"),
            "mode": self.mode,
            "precision": "float32",
            "seed": self.seed,
            "spare_columns": 0,
            "batches_at_once": 1,
        }
        return LearnerInfo(**{**usual, **changes})

    def spaces(self) -> tuple[spaces.ObservationSpace, spaces.ActionSpace, int]:
        """Returns observation space (before stacking), action space and frame stack."""
        env = envs.make(self.described_as or self.env_id, 1)
        env.close()
        return env.observation_space, env.action_space, env.frame_stack


@dataclass(frozen=True)
class Running:
    """A started source."""

    source: Any
    agent: Agent
    weights: Any  # publish(model, version)
    supervisor: Supervisor


@dataclass(frozen=True)
class Recording:
    """Copies of the first rollouts of a source, and the agent that acted."""

    setup: Setup
    agent: Agent
    rollouts: list[Rollout]
    num_bytes: int  # of the source


# One group whose rollouts fill a batch: column b is environment b in every batch.
CASES = {
    "vector": Setup(env_id="Catch", model="mlp", unroll_length=12),
    "vector-lstm": Setup(env_id="Catch", model="mlp", use_lstm=True, unroll_length=12),
    "stacked-lstm": Setup(env_id="source_envs:Stacked", model="shallow", use_lstm=True),
    "rewards": Setup(env_id="source_envs:Counting", model="mlp", reward_input="none"),
    "nested-lstm": Setup(env_id="source_envs:Nested", model="mlp", use_lstm=True, unroll_length=7),
    "counting": Setup(env_id="source_envs:Counting", num_envs=4, batch_size=4),
}
NUM_ROLLOUTS = 6


class SourceCompliance:
    def running(self, setup: Setup) -> AbstractContextManager[Running]:
        """Starts a source, and ends it with everything that belongs to it."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def record(cls) -> Callable[[str], Recording]:
        """Returns recordings by the name of their case, each made once."""
        return functools.cache(lambda case: recorded(cls().running(CASES[case]), CASES[case]))

    @pytest.fixture(scope="class", params=CASES)
    @classmethod
    def recording(cls, record: Any, request: Any) -> Recording:
        """Returns the recording of a case; all tests of one case run before those of the next."""
        return record(request.param)

    # --- memory

    def test_it_counts_two_batches_and_the_rollouts_that_are_written(
        self, recording: Recording
    ) -> None:
        setup, one = recording.setup, recording.rollouts[0]
        fields = [field.name for field in dataclasses.fields(one)]
        nests = [getattr(one, name) for name in fields if name != "final_observation"]
        of_batch = sum(leaf.nbytes for leaf in flatten(nests) if isinstance(leaf, Tensor))
        columns = 2 * setup.batch_size + setup.num_envs
        assert recording.num_bytes >= columns * of_batch // setup.batch_size > 0

    # --- rows

    def test_every_field_has_its_dtype_and_shape(self, recording: Recording) -> None:
        for rollout in recording.rollouts:
            check_rollout(rollout)
            for name, expected in _expected_fields(recording.setup, recording.agent).items():
                found = map_leaves(_spec_of, getattr(rollout, name))
                if name == "final_observation":
                    found = map_leaves(
                        lambda spec: dataclasses.replace(spec, shape=spec.shape[1:]), found
                    )
                assert found == expected, name

    def test_the_learner_computes_exactly_the_policies_that_acted(
        self, recording: Recording
    ) -> None:
        for rollout in recording.rollouts:
            logits, baseline, _ = _forward(recording.agent, rollout)
            computed = {"policy_logits": logits, "baseline": baseline}
            for name, extra in rollout.extras.items():
                torch.testing.assert_close(extra[1:], computed[name][:-1], atol=1e-4, rtol=1e-4)
            assert sorted(rollout.extras) == sorted(recording.setup.extras)
            assert rollout.policy_version[1:].eq(recording.setup.version).all()
        assert any(rollout.done[1:].any() for rollout in recording.rollouts)

    def test_row_0_repeats_the_last_row_of_the_rollout_before(self, recording: Recording) -> None:
        for before, after in itertools.pairwise(recording.rollouts):
            for name in _ROW_FIELDS:
                map_leaves2(
                    lambda a, b, name=name: _assert_equal(a[-1], b[0], name),
                    getattr(before, name),
                    getattr(after, name),
                )

    def test_rollouts_are_numbered_by_environment_and_from_0_within_it(
        self, recording: Recording
    ) -> None:
        numbers = recording.rollouts[0].env_index[0]
        assert len(numbers.unique()) == recording.setup.batch_size == len(numbers)
        for index, rollout in enumerate(recording.rollouts):
            assert rollout.env_index.eq(numbers).all(), "an environment keeps its number"
            assert rollout.rollout_index.eq(index).all()
            assert rollout.valid is None, "all of it was played"

    def test_the_recurrent_state_continues_from_rollout_to_rollout(
        self, recording: Recording
    ) -> None:
        state = recording.agent.model.initial_state(recording.setup.batch_size)
        for rollout in recording.rollouts:
            _assert_close_nests(rollout.initial_agent_state, state)
            state = _forward(recording.agent, rollout, rows=slice(0, -1)).core_state

    def test_an_action_is_in_the_row_of_its_result(self, record: Any) -> None:
        recording = record("nested-lstm")
        bounds = (-0.5, 0.5)
        for rollout in recording.rollouts:
            going_on = ~rollout.done[1:]  # else the observation is the next episode's first
            assert going_on.any()
            shown = map_leaves(
                lambda leaf, rows=going_on: leaf[1:][rows], rollout.observation["shown"]
            )
            chosen = map_leaves(lambda leaf, rows=going_on: leaf[1:][rows], rollout.action)
            assert shown["choice"].tolist() == chosen["choice"].tolist()
            assert set(chosen["choice"].tolist()) <= {1, 2, 3}
            (pair, number), (shown_pair, shown_number) = chosen["levers"], shown["levers"]
            _assert_equal(shown_pair, pair, "levers[0]")
            _assert_equal(shown_number, number.clamp(*bounds), "levers[1], as it was executed")
            _assert_equal(shown["switches"], chosen["switches"], "switches")

    def test_frames_are_stacked_oldest_first_from_the_first_of_the_episode(
        self, record: Any
    ) -> None:
        for rollout in record("stacked-lstm").rollouts:
            frames = rollout.observation[..., 0, 0].long()
            newest = frames[..., -1:]
            expected = torch.cat([newest - 2, newest - 1, newest], -1).clamp(min=0)
            _assert_equal(frames, expected, "stacks")
            for final in rollout.final_observation[..., 0, 0].tolist():
                assert final == [2, 3, 4]

    # --- ends

    def test_ends_counters_and_returns_match_their_definition(self, record: Any) -> None:
        recording = record("counting")
        for index in range(4):
            rows = _life_of(index)
            last: _Row | None = None
            for rollout in recording.rollouts:
                expected = [
                    last or next(rows),
                    *itertools.islice(rows, recording.setup.unroll_length),
                ]
                last = expected[-1]
                for name in dataclasses.asdict(last):
                    found = getattr(rollout, name)[:, index].flatten().tolist()
                    assert found == [getattr(row, name) for row in expected], name

    def test_the_last_observation_of_a_truncated_episode_is_kept(self, record: Any) -> None:
        expected = {(1, 4): 4, (3, 1): 1, (3, 7): 2}  # by environment and length of the game
        seen = 0
        for rollout in record("counting").rollouts:
            rows, columns = rollout.truncations()
            assert len(rollout.final_observation) == len(rows)
            for row, column, final in zip(rows, columns, rollout.final_observation, strict=True):
                game = int(column), int(rollout.episode_step[row, column])
                assert final.tolist() == [expected[game]]
                seen += 1
        assert seen > 8

    def test_the_recurrent_state_is_zero_at_the_start_and_after_every_end(
        self, record: Any
    ) -> None:
        """The model counts rows: its value for a row is the count up to the row before."""
        first = record("counting").rollouts[0]
        assert first.initial_agent_state.eq(0).all() and first.done[0].all()
        for rollout in record("counting").rollouts:
            counted = rollout.extras["baseline"][1:]
            assert counted[rollout.done[:-1]].eq(1).all()
            _assert_equal(counted, rollout.observation[:-1, :, 0] + 1, "rows since the last end")

    def test_finished_episodes_are_whole_games(self, record: Any) -> None:
        found = [rollout.finished_episodes()[1] for rollout in record("counting").rollouts]
        lengths = {length for lengths in found for length in lengths}
        assert lengths == {3, 4, 7, 1}, "2, 2 and 3 steps are one game of three lives"

    def test_a_row_that_only_begins_a_game_is_no_valid_step(self) -> None:
        setup = Setup(env_id="source_envs:BeginningLate", model="mlp", unroll_length=12)
        with self.running(setup) as running:
            rollouts = take(running, 3)
        seen = 0
        for rollout in rollouts:
            resets = rollout.done[1:] & (rollout.episode_step[1:] == 0)
            seen += int(resets.sum())
            assert rollout.valid is not None
            _assert_equal(rollout.valid[1:], ~resets, "valid")
            assert rollout.num_steps == rollout.env_steps == 24 - int(resets.sum())
            assert set(rollout.finished_episodes()[1]) == {3, 4}
        assert seen == 9, "games of three steps: every fourth row"

    def test_a_q_network_explores_and_its_values_are_in_the_rollout(self) -> None:
        setup = Setup(
            env_id="Catch", model="q-mlp", unroll_length=20, extras=("q_values",), mode="explore"
        )
        with self.running(setup) as running:
            (rollout,) = take(running, 1)
        with torch.no_grad():
            values = running.agent.model(rollout.observation.flatten(0, 1)).unflatten(0, (21, -1))
        values = values[:-1]
        assert list(rollout.extras) == ["q_values"]
        torch.testing.assert_close(rollout.extras["q_values"][1:], values, atol=1e-4, rtol=1e-4)
        assert 0 < (rollout.action[1:] == values.argmax(-1)).float().mean() < 1, "epsilon is 1"

    # --- weights

    def test_rows_have_the_version_that_acted_and_it_never_decreases(self) -> None:
        """A thread publishes all the time until four rollouts were acted with several versions."""
        setup = Setup(env_id="source_envs:Counting", unroll_length=60)
        newest, mixed, stopped = setup.version, 0, threading.Event()
        late = time.monotonic() + LATE
        with self.running(setup) as running:
            unscaled = running.agent._replace(model=copy.deepcopy(running.agent.model))
            publishing = Background(_publish_until, stopped, running, setup.version)
            try:
                for taken, rollout in enumerate(running.source.batches(), 1):
                    versions = rollout.policy_version[1:]
                    scale = torch.where(versions == setup.version, 1, versions)
                    counted = _forward(unscaled, rollout).baseline[:-1]
                    values = rollout.extras["baseline"][1:]
                    _assert_equal(values, counted * scale, "the value of those weights")
                    assert (versions.diff(dim=0) >= 0).all() and int(versions.min()) >= newest
                    newest = int(versions.max())
                    mixed += int(versions.min() < versions.max())
                    if mixed >= 4 and taken >= 12:
                        break
                    assert time.monotonic() < late, f"{mixed} of {taken} rollouts are mixed"
            finally:
                stopped.set()
            publishing.result()
        assert running.supervisor.failure is None
        assert mixed >= 4

    # --- what it says of itself

    def test_the_seconds_of_every_stage_grow_while_it_collects(self) -> None:
        with self.running(Setup(env_id="source_envs:Counting")) as running:
            batches = running.source.batches()
            next(batches)
            early = running.source.seconds()
            for _ in range(5):
                next(batches)
            late, status = running.source.seconds(), running.source.status()
        computing = early.pop("computing", 0.0), late.pop("computing", 1.0)  # on other machines
        assert set(early) == set(late) == set(ACTOR_STAGES) and computing[0] < computing[1]
        assert all(late[stage] >= early[stage] >= 0 for stage in ACTOR_STAGES)
        for stage in ("environment", "inference"):
            assert late[stage] > early[stage] > 0, stage
        assert status["learner_queue_size"] >= 0 and alive(status)[1] == 1
        learnt = 6 * Setup.batch_size * Setup.unroll_length
        assert learnt <= status["collected_steps"], "and some that are not learnt from"
        assert running.source.hanging() == "" and running.source.lost_streams() == []

    def test_a_waiting_batch_is_counted_in_rollouts(self) -> None:
        setup = Setup(env_id="source_envs:Counting", num_envs=4, batch_size=4)
        with self.running(setup) as running:
            wait_for(lambda: running.source.status()["learner_queue_size"] >= 4, LATE)
        assert running.supervisor.failure is None

    # --- seeds

    def test_the_seed_decides_how_the_environments_begin(self) -> None:
        first, again, other = (self._balls(seed) for seed in (3, 3, 4))
        assert first == again
        assert first != other
        assert len({*first}) == 8, "every environment is seeded on its own"

    def _balls(self, seed: int) -> list[tuple[int, ...]]:
        """Returns the columns in which the first balls of 8 environments fall."""
        setup = Setup(
            env_id="Catch", num_envs=8, num_groups=2, batch_size=8, unroll_length=60, seed=seed
        )
        beginnings: list[tuple[int, ...]] = []
        with self.running(setup) as running:
            batches = running.source.batches()
            while len(beginnings) < 8:  # the first batch may hold two rollouts of one group
                rollout = next(batches)
                balls = rollout.observation[:, :, :-1].flatten(2).argmax(-1)
                new = rollout.episode_step[0] == 0
                beginnings += [tuple(column.tolist()) for column in balls[:, new].T]
        assert running.supervisor.failure is None
        return sorted(beginnings)

    # --- endings

    def test_closing_wakes_whoever_waits_for_a_batch(self) -> None:
        setup = Setup(env_id="source_envs:Numbered", unroll_length=10**5)
        with self.running(setup) as running:
            waiting = [Background(list, running.source.batches()) for _ in range(2)]
            running.source.close()
            running.source.close()  # a second time is fine
            assert [waiter.result(LATE) for waiter in waiting] == [[], []]
        assert running.supervisor.failure is None

    def test_learner_threads_get_every_column_exactly_once(self) -> None:
        length, taken_by_each = 5, 6
        setup = Setup(
            env_id="source_envs:Numbered",
            num_envs=4,
            num_groups=2,
            batch_size=3,  # rollouts of two environments are split over batches
            unroll_length=length,
        )
        with self.running(setup) as running:
            takers = [Background(take, running, taken_by_each) for _ in range(3)]
            rollouts = [rollout for taker in takers for rollout in taker.result(LATE)]
        assert running.supervisor.failure is None
        starts: dict[int, list[int]] = {}
        indices: dict[int, set[int]] = {}
        for rollout in rollouts:
            check_rollout(rollout)
            for b, column in enumerate(rollout.observation.unbind(1)):
                number, start = column[0, :2].tolist()
                assert rollout.rollout_index[:, b].eq(start // length).all()
                indices.setdefault(number, set()).update(rollout.env_index[:, b].tolist())
                assert column[:, 0].tolist() == [number] * (length + 1)
                assert column[:, 1].tolist() == list(range(start, start + length + 1))
                starts.setdefault(number, []).append(start)
        assert sum(map(len, starts.values())) == 3 * 3 * taken_by_each
        for found in starts.values():
            assert sorted(found) == [length * i for i in range(len(found))]
        assert all(len(found) == 1 for found in indices.values()), "an environment keeps its number"
        assert len(set.union(*indices.values())) == len(indices)

    def test_an_environment_that_raises_ends_the_run_with_its_traceback(self) -> None:
        with self.running(Setup(env_id="source_envs:Raises")) as running:
            assert list(running.source.batches()) == [], "the first rollout is not whole"
            wait_for(lambda: running.supervisor.ended, LATE)
        failure = str(running.supervisor.failure)
        assert "KeyError: 'the joystick is gone'" in failure, failure
        assert "source_envs.py" in failure and "in step" in failure, failure

    def test_an_environment_that_cannot_be_made_ends_the_run_with_its_origin(self) -> None:
        setup = Setup(env_id="source_envs:CannotBeMade", described_as="source_envs:Numbered")
        with self.running(setup) as running:
            assert list(running.source.batches()) == []
            wait_for(lambda: running.supervisor.ended, LATE)
        failure = str(running.supervisor.failure)
        assert "no ROM in the slot" in failure and "source_envs.py" in failure, failure


def take(running: Running, count: int) -> list[Rollout]:
    """Returns copies of the next rollouts, because a source may reuse the memory of its batches."""
    rollouts = [copy_of(r) for r in itertools.islice(running.source.batches(), count)]
    assert len(rollouts) == count, running.supervisor.failure
    return rollouts


def copy_of(rollout: Rollout) -> Rollout:
    return rollout.map(torch.clone)


def recorded(context: AbstractContextManager[Running], setup: Setup) -> Recording:
    """Returns copies of the first rollouts of a source."""
    with context as running:
        rollouts = take(running, NUM_ROLLOUTS)
        num_bytes = running.source.num_bytes
    assert running.supervisor.failure is None
    return Recording(setup, running.agent, rollouts, num_bytes)


@torch.no_grad()
def _forward(agent: Agent, rollout: Rollout, rows: slice = slice(None)) -> Any:
    """Returns the model's output on the first rows of a rollout."""
    inputs = rollout.observation, rollout.reward, rollout.done, rollout.action
    taken = map_leaves(lambda leaf: leaf[rows], inputs)
    return agent.model(ModelInputs(*taken), rollout.initial_agent_state)


@torch.no_grad()
def _publish_until(stopped: threading.Event, running: Running, version: int) -> None:
    """Publishes distinct weights again and again."""
    while not stopped.wait(0.0005):
        version += 1
        running.agent.model.scale.fill_(version)
        running.weights.publish(running.agent.model, version)


_ROW_FIELDS = (
    "observation",
    "reward",
    "done",
    "episode_step",
    "episode_return",
    "action",
    "extras",
    "truncated",
    "episode_end",
    "policy_version",
    "env_index",
)


def _expected_fields(setup: Setup, agent: Agent) -> dict[str, Any]:
    """Returns nests of ArraySpec; that of final_observation lacks the first dimension."""
    observation, action, frame_stack = setup.spaces()
    seen = stacked_space(observation, frame_stack)
    leading = setup.unroll_length + 1, setup.batch_size

    def rows(shape: tuple[int, ...], dtype: str) -> spaces.ArraySpec:
        return spaces.ArraySpec((*leading, *shape), dtype)

    state = agent.model.initial_state(setup.batch_size)
    num_params = agent.model.distribution.num_params
    given = {"policy_logits": ((num_params,), "float32"), "baseline": ((), "float32")}
    return {
        "observation": map_leaves(lambda spec: rows(spec.shape, spec.dtype), seen),
        "reward": rows((), "float32"),
        "done": rows((), "bool"),
        "episode_step": rows((), "int32"),
        "episode_return": rows((), "float32"),
        "action": map_leaves(lambda leaf: rows(*_action_shape(leaf)), action),
        "extras": {name: rows(*given[name]) for name in setup.extras},
        "initial_agent_state": map_leaves(
            lambda leaf: spaces.ArraySpec(tuple(leaf.shape), "float32"), state
        ),
        "truncated": rows((), "bool"),
        "episode_end": rows((), "bool"),
        "policy_version": rows((), "int64"),
        "final_observation": seen,
        "env_index": rows((), "int64"),
        "rollout_index": rows((), "int64"),
    }


def _action_shape(leaf: Any) -> tuple[tuple[int, ...], str]:
    match leaf:
        case spaces.Discrete():
            return (), "int64"
        case spaces.MultiDiscrete(nvec):
            return (len(nvec),), "int64"
        case spaces.MultiBinary(shape):
            return shape, "int8"
        case spaces.Box(_, _, shape, dtype):
            return shape, dtype
    raise AssertionError(f"not an action space: {leaf}")


def _spec_of(leaf: Tensor) -> spaces.ArraySpec:
    return spaces.ArraySpec(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class _Row:
    """The output of one environment after a step, or at the start."""

    observation: float
    reward: float
    done: bool
    truncated: bool
    episode_end: bool
    episode_step: int
    episode_return: float


def _life_of(index: int) -> Iterator[_Row]:
    """Yields the rows of environment `index` of `Counting`, by the definition of the fields."""
    yield _Row(0, 0, True, False, False, 0, 0)
    step, total = 0, np.float32(0)
    for length, how in itertools.cycle(SCHEDULES[index]):
        for at in range(1, length + 1):
            step, total = step + 1, total + np.float32(reward_of(index, at))
            last = at == length
            yield _Row(
                observation=0 if last else at,
                reward=reward_of(index, at),
                done=last,
                truncated=last and how == "truncated",
                episode_end=last and how != "life",
                episode_step=step,
                episode_return=float(total),
            )
        if how != "life":
            step, total = 0, np.float32(0)


def _assert_equal(a: Tensor, b: Tensor, what: str) -> None:
    torch.testing.assert_close(a, b, atol=0, rtol=0, msg=lambda text: f"{what}: {text}")


def _assert_close_nests(a: Any, b: Any) -> None:
    assert len(flatten(a)) == len(flatten(b))
    map_leaves2(lambda x, y: torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4), a, b)
