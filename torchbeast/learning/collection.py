# SPDX-License-Identifier: Apache-2.0
"""Makes the source of a run and the replay in front of it, for programs and for a Learner in
Python.

Each function imports only its own kind of source: a program loads nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchbeast.core.specs import Precision
from torchbeast.envs.spec import EnvSpec
from torchbeast.learning.learner_run import Learner, WithReplay
from torchbeast.sources.config import ReplayConfig

if TYPE_CHECKING:
    from torchbeast.core.envs.vec_env import VecEnv
    from torchbeast.processes.supervisor import Supervisor
    from torchbeast.schemes.config import RayConfig
    from torchbeast.schemes.ray_source import RaySource
    from torchbeast.schemes.room import Room
    from torchbeast.sources.local.source import LocalSource
    from torchbeast.sources.processes.config import ProcessesConfig
    from torchbeast.sources.processes.fleet import Fleet
    from torchbeast.sources.processes.source import MonoSource
    from torchbeast.sources.servers.config import PipelineConfig
    from torchbeast.sources.servers.discovery import Fleet as ServedFleet
    from torchbeast.sources.servers.door import HostDoor
    from torchbeast.sources.servers.env_servers import EnvServers
    from torchbeast.sources.servers.source import PolySource


def local_source(
    learner: Learner[Any],
    env: EnvSpec,
    precision: Precision,
    make_env: Callable[[int], VecEnv],
    num_envs: int,
    stops_early: Callable[[float], bool] | None,
) -> LocalSource:
    """Returns the source that plays in this process."""
    from torchbeast.sources.local.source import LocalSource, LocalSourceConfig

    config = LocalSourceConfig(
        num_envs=num_envs,
        precision=precision,
        num_batches=learner.batches_at_once,
        info_keywords=env.options.info_keywords,
        stops_early=stops_early,
        **_batches(learner),
    )
    return LocalSource(learner.agent, learner.weights, learner.compute.device, make_env, config)


def process_source(
    learner: Learner[Any],
    env: EnvSpec,
    precision: Precision,
    processes: ProcessesConfig,
    on_demand: bool,
) -> MonoSource:
    """Returns the source of actor processes of this machine.

    on_demand: collect nothing before a batch is asked for.
    """
    from torchbeast.sources.processes.source import MonoSource, MonoSourceConfig

    config = MonoSourceConfig(
        env=env,
        actor=learner.agent.spec,
        precision=precision,
        processes=processes,
        num_batches=1 + learner.batches_at_once,
        on_demand=on_demand,
        **_batches(learner),
    )
    return MonoSource(learner.agent, learner.weights, learner.compute.device, config)


def ray_source(
    learner: Learner[Any],
    env: EnvSpec,
    precision: Precision,
    fleet: Fleet,
    ray: RayConfig,
    num_workers: int,
    room: Room | None = None,
) -> RaySource:
    """Returns the source of a fleet of Ray actors.

    room: of the cluster, in which rollouts and weights must fit; None: not known.
    """
    from torchbeast.schemes.ray_source import RaySource, RaySourceConfig, rollout_bytes
    from torchbeast.schemes.room import check_object_store

    config = RaySourceConfig(
        env=env,
        actor=learner.agent.spec,
        precision=precision,
        fleet=ray,
        num_workers=num_workers,
        num_batches=1 + learner.batches_at_once,
        **_batches(learner),
    )
    if room is not None:
        size = rollout_bytes(learner.agent, config)
        check_object_store(room, size, ray.buffers(), learner.weights.num_bytes)
    return RaySource(learner.agent, learner.weights, learner.compute.device, fleet, config)


def served_source(
    learner: Learner[Any],
    fleet: ServedFleet,
    pipeline: PipelineConfig,
    *,
    door: HostDoor | None = None,
    start_servers: Callable[[Supervisor], EnvServers] | None = None,
    kind: type[PolySource] | None = None,
) -> PolySource:
    """Returns the source of environment servers.

    door, start_servers: see PolySource. kind: a subclass of it to make.
    """
    from torchbeast.sources.servers.source import PolySource

    return (kind or PolySource)(
        fleet,
        learner.agent,
        learner.weights,
        learner.compute.device,
        pipeline=pipeline,
        num_batches=1 + learner.batches_at_once,
        door=door,
        start_servers=start_servers,
        **_batches(learner),
    )


def replay_of(config: ReplayConfig) -> WithReplay | None:
    """Returns what puts a replay in front of the source of a run; None: it has none."""
    if not config.is_used:
        return None
    from torchbeast.learning import replay

    return replay.own_replay if config.replay_service is None else replay.shared_replay


def _batches(learner: Learner[Any]) -> dict[str, Any]:
    """Returns what every kind of source needs to know of the learner's batches."""
    names = ("rollouts", "extras", "mode", "spare_columns", "seed")
    return {name: getattr(learner, name) for name in names}
