# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine, and RayBeast's source on it for as long as a `with` block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compliance.source import Running, Setup

from torchbeast.core.actors.registry import make_agent
from torchbeast.envs import EnvSpec
from torchbeast.processes.supervisor import Supervisor
from torchbeast.schemes.config import RayConfig
from torchbeast.schemes.ray_source import FleetWeights, RaySource, RaySourceConfig
from torchbeast.sources.config import RolloutConfig
from torchbeast.sources.processes.fleet import Fleet, Place, WorkerLost

SOON = 30.0


def config_of(setup: Setup, **of_fleet: Any) -> RaySourceConfig:
    return RaySourceConfig(
        env=EnvSpec(setup.env_id),
        actor=setup.actor(),
        precision="float32",
        fleet=RayConfig(num_actors=setup.num_envs, **of_fleet),
        num_workers=setup.num_groups,
        rollouts=RolloutConfig(batch_size=setup.batch_size, unroll_length=setup.unroll_length),
        extras=setup.extras,
        mode=setup.mode,
        seed=setup.seed,
    )


@contextmanager
def running_on(fleet: Fleet, setup: Setup, **of_fleet: Any) -> Iterator[Running]:
    observation, action, frame_stack = setup.spaces()
    torch.manual_seed(0)
    agent = make_agent(setup.actor(), observation, action, frame_stack)
    weights = FleetWeights(agent.model, setup.version)
    config = config_of(setup, **of_fleet)
    source = RaySource(agent, weights, torch.device("cpu"), fleet, config)
    supervisor = Supervisor()
    try:
        source.start(supervisor)
        yield Running(source, agent, weights, supervisor)
    finally:
        supervisor.stop("the test ended")
        source.end()
        assert supervisor.join(SOON) == []


class Pool:
    """A fleet that lends its workers to one source after the other: they take seconds to start."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._idle: list[Lent] = []
        self._lent: list[Lent] = []

    @property
    def own_node(self) -> str:
        return self._fleet.own_node

    def worker(self, name: str) -> Lent:
        made = self._idle.pop() if self._idle else Lent(self._fleet.worker(f"lent {name}"))
        self._lent.append(made)
        return made

    def put(self, value: Any) -> Any:
        return self._fleet.put(value)

    def explain(self, error: WorkerLost, place: Place | None) -> WorkerLost:
        return self._fleet.explain(error, place)

    @contextmanager
    def loan(self) -> Iterator[None]:
        """Lends workers to the source of a `with` block; ends those of one that fails."""
        try:
            yield
        except BaseException:
            for worker in self._lent:
                worker.kill()
            raise
        finally:
            self._idle += [worker for worker in self._lent if not worker.is_killed]
            self._lent = []

    def forget(self, index: int) -> None:
        """Keeps a lent worker, which is about to be killed, from being lent again."""
        self._lent[index].is_killed = True

    def clear(self) -> None:
        """Ends the workers that are not lent."""
        for worker in self._idle:
            worker.kill()
        self._idle = []


@dataclasses.dataclass
class Lent:
    """A worker that remembers whether it was killed."""

    worker: Any
    is_killed: bool = False

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        self.worker.call(then, method, *arguments)

    def kill(self) -> None:
        self.is_killed = True
        self.worker.kill()
