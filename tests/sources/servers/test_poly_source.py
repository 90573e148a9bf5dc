# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's source keeps the contract of sources. The server is a thread of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from compliance.source import Running, Setup, SourceCompliance
from serving import serving

from torchbeast import envs
from torchbeast.core.actors.agent import make_agent
from torchbeast.core.envs.spaces import action_space_to_json
from torchbeast.core.nest_py import map_leaves
from torchbeast.learning.weights import PublishedWeights
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.config import RolloutConfig
from torchbeast.sources.servers import server_main as env_process
from torchbeast.sources.servers.config import PipelineConfig
from torchbeast.sources.servers.discovery import ask_all
from torchbeast.sources.servers.source import PolySource

SOON = 30.0


def test_a_learner_knows_the_ranges_of_values_of_a_served_space(tmp_path: Path) -> None:
    env = envs.make("Blackjack-v1", 2)
    arguments = {"num_streams": 1, "num_servers": 1}
    description = env_process._description(env, envs.EnvSpec("Blackjack-v1"), arguments)
    with serving(lambda: env, f"unix:{tmp_path}/server", description=description):
        fleet = ask_all([f"unix:{tmp_path}/server"], SOON)
    sizes = [spec.categories for spec in fleet.observation_space]
    assert sizes == [(32,), (11,), (2,)]
    assert fleet.observation_space == env.observation_space


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


@contextmanager
def playing_with(env_class: Callable[[], Any]) -> Iterator[Running]:
    """Starts a source of a single environment, whose server describes it by itself."""
    setup = Setup(env_id="", num_envs=1)
    with served(env_class) as address, playing(address, setup) as running:
        yield running


@contextmanager
def playing(address: str, setup: Setup) -> Iterator[Running]:
    """Starts a source of the servers at an address."""
    fleet = ask_all([address], SOON)
    assert fleet.action_space is not None
    torch.manual_seed(0)
    spaces = fleet.observation_space, fleet.action_space
    agent = make_agent(setup.actor(), *spaces, fleet.frame_stack)
    weights = PublishedWeights(agent.model, setup.version)
    source = PolySource(
        fleet,
        agent.model,
        weights,
        torch.device("cpu"),
        RolloutConfig(batch_size=setup.batch_size, unroll_length=setup.unroll_length),
        PipelineConfig(num_inference_threads=setup.num_groups),
        extras=setup.extras,
        mode=setup.mode,
        seed=setup.seed,
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
        "action_space": action_space_to_json(action),
    }
