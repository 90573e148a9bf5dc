# SPDX-License-Identifier: Apache-2.0
"""What PolyBeast's source hands to the learner is what the policy saw and did."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from torchbeast import envs
from torchbeast.core.actors.actor_critic import ModelInputs
from torchbeast.core.envs.spaces import action_space_to_json
from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages.rollout import Rollout
from torchbeast.runtime.agent import Agent, make_agent
from torchbeast.runtime.supervisor import Supervisor
from torchbeast.runtime.weights import PublishedWeights

libtorchbeast = pytest.importorskip("libtorchbeast")

from torchbeast.sources.discovery import ask_all  # noqa: E402
from torchbeast.sources.poly import PolySource, PolySourceConfig  # noqa: E402

SOON = 30.0


@contextmanager
def serving(env_id: str, num_envs: int, num_streams: int, folder: Path) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    address = f"unix:{folder}/{env_id}.0"
    env = envs.make(env_id, num_envs)
    description = {
        "env_id": env_id,
        "num_envs": num_envs,
        "num_streams": num_streams,
        "frame_stack": env.frame_stack,
        "observation": map_leaves(lambda spec: (spec.dtype, spec.shape), env.observation_space),
        "action_space": action_space_to_json(env.action_space),
    }
    server = libtorchbeast.Server(
        lambda: envs.make(env_id, num_envs), address, description=description
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert server.wait_until_serving(SOON)
        yield address
    finally:
        server.stop()
        thread.join(SOON)
        assert not thread.is_alive()


@contextmanager
def collecting(
    address: str, model: str, use_lstm: bool, config: PolySourceConfig
) -> Iterator[tuple[PolySource, Agent]]:
    fleet = ask_all([address], SOON)
    assert fleet.action_space is not None
    torch.manual_seed(0)
    spaces = fleet.observation_space, fleet.action_space
    agent = make_agent(model, *spaces, fleet.frame_stack, use_lstm)
    weights = PublishedWeights(agent.model, 7)
    source = PolySource(fleet, *agent, weights, torch.device("cpu"), config)
    supervisor = Supervisor()
    source.start(supervisor)
    try:
        yield source, agent
    finally:
        supervisor.stop("the test ended")
        assert supervisor.join(SOON) == []
        assert supervisor.failure is None


def recomputed(rollout: Rollout, agent: Agent) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = ModelInputs(rollout.observation, rollout.reward, rollout.done, rollout.action)
    with torch.no_grad():
        logits, baseline, _ = agent.model(inputs, rollout.initial_agent_state)
    return logits, baseline


@pytest.mark.parametrize(
    ("env_id", "model", "use_lstm"),
    [
        ("Catch", "mlp", False),
        ("Catch", "mlp", True),
        ("Memory", "mlp", True),
        ("Mock", "shallow", True),  # stacked frames, and a net that sees the last action
    ],
)
def test_the_learner_computes_from_a_rollout_exactly_the_policies_that_acted(
    runtime_folder: Path, env_id: str, model: str, use_lstm: bool
) -> None:
    config = PolySourceConfig(batch_size=4, unroll_length=12, seed=3)
    with (
        serving(env_id, 2, 2, runtime_folder) as address,
        collecting(address, model, use_lstm, config) as (source, agent),
    ):
        rollouts = list(itertools.islice(source.batches(), 4))
    assert len(rollouts) == 4
    for rollout in rollouts:
        rollout.check()
        logits, baseline = recomputed(rollout, agent)
        torch.testing.assert_close(rollout.policy_logits[1:], logits[:-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rollout.baseline[1:], baseline[:-1], atol=1e-4, rtol=1e-4)
        assert rollout.policy_version[1:].eq(7).all()
        assert len(flatten(rollout.initial_agent_state)) == (2 if use_lstm else 0)
    assert any(rollout.done[1:].any() for rollout in rollouts) or env_id == "Mock"


def first_balls(folder: Path, seed: int) -> list[int]:
    """The columns in which the first balls of 16 environments fall."""
    config = PolySourceConfig(batch_size=16, unroll_length=3, seed=seed)
    with (
        serving("Catch", 8, 2, folder) as address,
        collecting(address, "mlp", False, config) as (source, _),
    ):
        rollout = next(source.batches())
    return sorted(rollout.observation[0, :, 0].argmax(-1).tolist())


def test_the_seed_decides_how_the_environments_begin(runtime_folder: Path) -> None:
    assert first_balls(runtime_folder, 3) == first_balls(runtime_folder, 3)
    assert len({tuple(first_balls(runtime_folder, seed)) for seed in range(3, 6)}) > 1


def test_every_environment_of_a_run_is_seeded_on_its_own(runtime_folder: Path) -> None:
    config = PolySourceConfig(batch_size=16, unroll_length=30, seed=3)
    with (
        serving("Catch", 8, 2, runtime_folder) as address,
        collecting(address, "mlp", False, config) as (source, _),
    ):
        rollout = next(source.batches())
    balls = rollout.observation[:, :, :-1].flatten(2).argmax(-1)
    columns = {tuple(balls[:, b].tolist()) for b in range(16)}
    assert len(columns) == 16


def test_closing_wakes_whoever_waits_for_a_batch(runtime_folder: Path) -> None:
    config = PolySourceConfig(batch_size=2, unroll_length=10**6)
    ended = threading.Event()
    with (
        serving("Catch", 1, 2, runtime_folder) as address,
        collecting(address, "mlp", False, config) as (source, _),
    ):

        def wait() -> None:
            assert list(source.batches()) == []
            ended.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        source.close()
        assert ended.wait(SOON)
        waiter.join(SOON)


def test_several_learner_threads_share_the_batches(runtime_folder: Path) -> None:
    config = PolySourceConfig(batch_size=2, unroll_length=5, num_inference_threads=2)
    got: list[Rollout] = []
    with (
        serving("Catch", 1, 2, runtime_folder) as address,
        collecting(address, "mlp", False, config) as (source, _),
    ):
        takers = [
            threading.Thread(target=lambda: got.extend(itertools.islice(source.batches(), 5)))
            for _ in range(3)
        ]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join(SOON)
    assert len(got) == 15
    for rollout in got:
        rollout.check()
