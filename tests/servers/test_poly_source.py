# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's source keeps the contract of sources. The server is a thread of this process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from assorted import check_rollout
from background import Background, wait_for
from compliance.source import CASES, NUM_ROLLOUTS, Running, Setup, SourceCompliance, copy_of
from serving import serving
from source_envs import Numbered

from torchbeast import envs
from torchbeast.collect.contract import LearnerInfo
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Actor, ModelInputs, zeros_of
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import space_to_json
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.servers import server_main as env_process
from torchbeast.servers.config import PipelineConfig
from torchbeast.servers.discovery import Asking, ServerFleet, fleet_of
from torchbeast.servers.source import PolySource

SOON = 30.0


def test_a_learner_knows_the_ranges_of_values_of_a_served_space(tmp_path: Path) -> None:
    env = envs.make("Blackjack-v1", 2)
    arguments = {"num_streams": 1, "num_servers": 1}
    description = env_process._description(env, envs.EnvSpec("Blackjack-v1"), arguments)
    with serving(lambda: env, f"unix:{tmp_path}/server", description=description):
        fleet = fleet_at(f"unix:{tmp_path}/server")
    sizes = [spec.categories for spec in fleet.observation_space]
    assert sizes == [(32,), (11,), (2,)]
    assert fleet.observation_space == env.observation_space


def fleet_at(*addresses: str) -> ServerFleet:
    asking = Asking(SOON, None)
    return fleet_of({address: asking.ask(address) for address in addresses})


class TestPolySource(SourceCompliance):
    @contextmanager
    def running(self, setup: Setup) -> Iterator[Running]:
        num_envs = setup.num_envs // setup.num_groups
        with (
            served(
                lambda: envs.make(setup.env_id, num_envs), described(setup, num_envs)
            ) as address,
            playing(address, setup) as running,
        ):
            yield running


SPARE = 3  # columns
FIELDS = [field.name for field in dataclasses.fields(Rollout)]
WITHOUT_COLUMNS = ("final_observation", "collected", "feeds_back", "give_feedback")


def fields_with_columns(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields of a rollout whose tensors are `[..., columns, ...]`, by name."""
    given = {name: getattr(rollout, name) for name in FIELDS if name not in WITHOUT_COLUMNS}
    return {name: nest for name, nest in given.items() if nest is not None}


def with_columns(rollout: Rollout) -> list[torch.Tensor]:
    """Returns all tensors `[..., columns, ...]` of a rollout."""
    return flatten(list(fields_with_columns(rollout).values()))


def without_spare(rollout: Rollout) -> Rollout:
    """Returns a copy of the columns that are not spare."""
    columns = map_leaves(lambda leaf: leaf[:, :-SPARE].contiguous(), fields_with_columns(rollout))
    return dataclasses.replace(rollout, **columns)


class TestSpareColumns:
    @pytest.mark.parametrize("case", ["counting", "stacked-lstm", "nested-lstm"])
    def test_every_field_with_columns_is_one_array_that_numpy_can_write(self, case: str) -> None:
        setup = CASES[case]
        with playing_locally(setup, spare_columns=SPARE) as running:
            rollout = next(running.source.batches())
            before = copy_of(without_spare(rollout))
            leaves, written = with_columns(rollout), []
            for offset, leaf in enumerate(leaves):
                assert leaf.shape[1] == setup.batch_size + SPARE
                assert leaf.is_contiguous(), "one allocation, in which every element is alone"
                spare = leaf.numpy()[:, -SPARE:]
                numbers = offset + np.arange(spare.size).reshape(spare.shape)
                written.append(numbers.astype(spare.dtype))
                spare[...] = written[-1]
            assert len(leaves) >= 12
            for leaf, values in zip(leaves, written, strict=True):
                np.testing.assert_array_equal(leaf[:, -SPARE:].numpy(), values)
            assert_same(without_spare(rollout), before)
        assert running.supervisor.failure is None

    def test_a_batch_with_all_columns_written_is_a_rollout(self) -> None:
        """Spare columns repeat the first one; final observations are then those of all columns."""
        with playing_locally(CASES["counting"], spare_columns=SPARE) as running:
            for rollout in itertools.islice(running.source.batches(), NUM_ROLLOUTS):
                for leaf in with_columns(rollout):
                    leaf[:, -SPARE:] = leaf[:, :1]
                check_rollout(rollout)  # environment 0 is never truncated
                assert rollout.batch_size == CASES["counting"].batch_size + SPARE
        assert running.supervisor.failure is None

    def test_spare_columns_keep_what_is_written_while_other_batches_come(self) -> None:
        with playing_locally(CASES["stacked-lstm"], spare_columns=SPARE) as running:
            batches = running.source.batches()
            early = next(batches)
            before = copy_of(without_spare(early))
            for leaf in with_columns(early):
                leaf[:, -SPARE:] = 1
            for later in itertools.islice(batches, 4):
                for leaf in with_columns(later):
                    leaf[...] = 0
            assert all((leaf[:, -SPARE:] == 1).all() for leaf in with_columns(early))
            assert_same(without_spare(early), before)
        assert running.supervisor.failure is None

    def test_batches_use_the_same_memory_again_and_again(self) -> None:
        with playing_locally(CASES["stacked-lstm"], spare_columns=SPARE) as running:
            batches = itertools.islice(running.source.batches(), 40)
            addresses = {rollout.observation.data_ptr() for rollout in batches}
        assert running.supervisor.failure is None
        assert len(addresses) < 20  # other arrays of about that size take turns with them


def assert_same(a: Rollout, b: Rollout) -> None:
    map_leaves2(assert_equal, fields_with_columns(a), fields_with_columns(b))
    map_leaves2(assert_equal, a.final_observation, b.final_observation)


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("spare_columns", [0, SPARE])
def test_the_info_of_a_game_is_in_the_row_of_its_final_return(spare_columns: int) -> None:
    spec = envs.EnvSpec("source_envs:Telling", options=envs.EnvOptions(info_keywords=KEYWORDS))
    setup = Setup(env_id=spec.name, batch_size=2, unroll_length=5)
    arguments = {"num_streams": 1, "num_servers": 1}
    description = env_process._description(envs.make(spec, 2), spec, arguments)
    assert description["info_keywords"] == list(KEYWORDS)
    assert not description["options"]["info_keywords"], "all that earlier learners read"
    games = 0
    with (
        served(
            lambda: env_process.ServedEnv(
                envs.make(spec, 2), KEYWORDS, env_process.ServerActivity(1), 0
            ),
            description,
        ) as address,
        playing(address, setup, spare_columns) as running,
    ):
        for rollout in itertools.islice(running.source.batches(), NUM_ROLLOUTS):
            here = rollout if spare_columns == 0 else without_spare(rollout)
            check_rollout(here)
            returns, lengths = here.finished_episodes()
            info = here.finished_info()
            assert sorted(info) == sorted(KEYWORDS)
            assert info["steps"] == lengths
            # The return of an episode of n steps is 1 + ... + n.
            squares = zip(info["squared"], lengths, strict=True)
            assert returns == [(square + length) / 2 for square, length in squares]
            nowhere = ~here.episode_end
            assert all(rows[nowhere].isnan().all() for rows in here.info.values())
            games += len(lengths)
    assert running.supervisor.failure is None
    assert games > NUM_ROLLOUTS


KEYWORDS = ("steps", "squared")


class StopsAfterOneRollout(Numbered):
    """Waits for `goes_on` in its eighth step."""

    goes_on = threading.Event()

    def step(self, action: Any) -> VecStep:
        if self._time == 7:
            self.goes_on.wait(SOON)
        return super().step(action)


@pytest.mark.parametrize("spare_columns", [0, SPARE])
def test_a_batch_that_is_not_whole_at_the_close_is_not_yielded(spare_columns: int) -> None:
    setup = Setup(env_id="source_envs:Numbered", num_envs=1, batch_size=2, unroll_length=5)
    StopsAfterOneRollout.goes_on.clear()
    with (
        served(lambda: StopsAfterOneRollout(1), described(setup, 1)) as address,
        playing(address, setup, spare_columns) as running,
    ):
        waiting = Background(list, running.source.batches())
        wait_for(lambda: running.source.status()["learner_queue_size"] == 1)
        waiting.wait_until_blocked()
        running.source.close()
        assert waiting.result() == []
        StopsAfterOneRollout.goes_on.set()
    assert running.supervisor.failure is None


def test_a_stream_in_a_long_step_holds_up_no_other_one() -> None:
    """Only one of two servers gives rollouts until the other's step ends; then both do."""
    setup = Setup(env_id="source_envs:Numbered", num_envs=1, batch_size=2, unroll_length=5)
    StopsAfterOneRollout.goes_on.clear()
    with (
        served(lambda: StopsAfterOneRollout(1), described(setup, 1)) as slow,
        served(lambda: Numbered(1), described(setup, 1)) as fast,
        playing(f"{slow},{fast}", setup) as running,
    ):
        batches = running.source.batches()
        while not has_rollout(next(batches), env_index=0, number=0):
            pass
        meanwhile = [rollout.env_index for rollout in itertools.islice(batches, 100)]
        assert all((env_index != 0).all() for env_index in meanwhile)
        StopsAfterOneRollout.goes_on.set()
        while not has_rollout(next(batches), env_index=0, number=1):
            pass
    assert running.supervisor.failure is None


def has_rollout(batch: Rollout, env_index: int, number: int) -> bool:
    found = (batch.env_index == env_index) & (batch.rollout_index == number)
    return bool(found.all(dim=0).any())


def test_batches_end_only_once_the_run_has_the_failure_that_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool that fails closes the queue before it raises; who waits for a batch asks then why."""
    monkeypatch.setattr(PolySource, "_play", lambda self: None)
    with playing_locally(Setup(env_id="Catch"), 0) as running:
        running.source._queue.close()
        batch = Background(next, running.source.batches(), None)
        batch.wait_until_blocked()
        running.supervisor.fail("environments", RunError("a stream failed"))
        assert batch.result() is None


@contextmanager
def playing_locally(setup: Setup, spare_columns: int) -> Iterator[Running]:
    """Starts a source of the setup's environments, in one group."""
    with (
        served(
            lambda: envs.make(setup.env_id, setup.num_envs), described(setup, setup.num_envs)
        ) as address,
        playing(address, setup, spare_columns) as running,
    ):
        yield running


@contextmanager
def playing_with(env_class: Callable[[], Any]) -> Iterator[Running]:
    """Starts a source of a single environment, whose server describes it by itself."""
    setup = Setup(env_id="", num_envs=1)
    with served(env_class) as address, playing(address, setup) as running:
        yield running


def test_a_source_that_has_lost_too_many_streams_says_when_the_run_ends() -> None:
    with contextlib.ExitStack() as server:
        address = server.enter_context(served(lambda: envs.make("Catch", 1)))
        with playing(address, Setup(env_id="", num_envs=1)) as running:
            batches = running.source.batches()
            next(batches)
            assert running.source.hanging() == ""
            rest = Background(collections.deque, batches, 0)  # a full queue would hide the loss
            server.close()
            wait_for(running.source.lost_streams)
            said = running.source.hanging()
    rest.result()
    assert re.search(r"Giving up in (5\d|60) s unless at least 1 stream is connected", said), said


@contextmanager
def playing(
    addresses: str, setup: Setup, spare_columns: int = 0, **options: Any
) -> Iterator[Running]:
    """Starts a source of the servers at these addresses, which are separated by commas."""
    fleet = fleet_at(*addresses.split(","))
    assert fleet.action_space is not None
    torch.manual_seed(0)
    spaces = fleet.observation_space, fleet.action_space
    agent = make_agent(setup.actor(), *spaces, fleet.frame_stack)
    weights = PublishedWeights(agent.model, setup.version)
    learner = LearnerInfo(
        rollouts=RolloutSpec(agent, setup.extras, setup.unroll_length),
        batch_size=setup.batch_size,
        weights=weights,
        device=torch.device("cpu"),
        mode=setup.mode,
        precision="float32",
        seed=setup.seed,
        spare_columns=spare_columns,
        batches_at_once=1,
    )
    source = PolySource(
        learner, fleet, PipelineConfig(num_inference_threads=setup.num_groups), **options
    )
    supervisor = Supervisor()
    source.start(supervisor)
    try:
        yield Running(source, agent, weights, supervisor)
    finally:
        supervisor.stop("the test ended")
        assert supervisor.join(SOON) == []


@contextmanager
def served(
    env_class: Callable[[], Any], description: dict[str, Any] | None = None
) -> Iterator[str]:
    """Serves these environments; yields the address."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:  # a short name: sockets need that
        address = f"unix:{Path(folder) / 'server'}"
        with serving(env_class, address, description=description):
            yield address


def described(setup: Setup, num_envs: int) -> dict[str, Any]:
    observation, action, frame_stack = setup.spaces()
    return {
        "env_id": setup.env_id,
        "num_envs": num_envs,
        "num_streams": setup.num_groups,
        "frame_stack": frame_stack,
        "observation": map_leaves(lambda spec: (spec.dtype, spec.shape), observation),
        "action_space": space_to_json(action),
    }


@pytest.mark.parametrize("dials_in", [False, True])
def test_graphs_are_recorded_for_environments_that_join_later(
    monkeypatch: pytest.MonkeyPatch, dials_in: bool
) -> None:
    asked: list[int] = []
    where = "torchbeast.servers.source.use_cuda_graphs"
    monkeypatch.setattr(where, lambda replicas, num_envs: asked.append(num_envs))
    setup = Setup(env_id="", num_envs=1)
    with served(lambda: envs.make("Catch", 1)) as address:
        with playing(address, setup, join_server=Mock() if dials_in else None):
            pass
    assert asked == [0 if dials_in else 1], "0: unknown"


@pytest.mark.parametrize("dials_in", [False, True])
def test_a_mask_of_zeros_from_a_host_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, dials_in: bool
) -> None:
    replicas: list[Actor] = []
    where = "torchbeast.servers.source.use_cuda_graphs"
    monkeypatch.setattr(where, lambda made, _: replicas.extend(made))
    setup = Setup(env_id="masked:Masked", num_envs=1)
    with served(lambda: envs.make(setup.env_id, 1), described(setup, 1)) as address:
        with playing(address, setup, join_server=Mock() if dials_in else None) as running:
            space, actions = running.agent.observation_space, running.agent.model.distribution
    reward, done = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)
    inputs = ModelInputs(zeros_of(space, 1, 1), reward, done, actions.zero_action((1, 1)))
    refused = pytest.raises(RunError, match="forbids every action")
    with contextlib.nullcontext() if dials_in else refused:
        replicas[0].act(inputs, replicas[0].initial_state(1))
