# SPDX-License-Identifier: Apache-2.0
"""Makes the source of a run and the replay in front of it, for programs and for a Learner in
Python.

Each function imports only its own kind of source: a program loads nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torchbeast.core.specs import Precision
from torchbeast.envs.spec import EnvSpec
from torchbeast.learning.learner_run import WithReplay
from torchbeast.sources.config import ReplayConfig
from torchbeast.sources.contract import Learner

if TYPE_CHECKING:
    from torchbeast.processes.supervisor import Supervisor
    from torchbeast.sources.processes.config import ProcessesConfig
    from torchbeast.sources.processes.source import FleetSource
    from torchbeast.sources.processes.weights import SharedWeights
    from torchbeast.sources.servers.config import PipelineConfig
    from torchbeast.sources.servers.discovery import Fleet as ServedFleet
    from torchbeast.sources.servers.door import HostDoor
    from torchbeast.sources.servers.env_servers import EnvServers
    from torchbeast.sources.servers.source import PolySource


def process_source(
    learner: Learner[SharedWeights],
    env: EnvSpec,
    precision: Precision,
    processes: ProcessesConfig,
    on_demand: bool,
    ending: ExitStack,
) -> FleetSource:
    """Returns the source of worker processes of this machine, which `ending` ends.

    on_demand: collect nothing before a batch is asked for.
    """
    from torchbeast.sources.processes.fleet import LocalFleet
    from torchbeast.sources.processes.source import WORKER, FleetSource

    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # there is a process per core
    fleet = ending.enter_context(LocalFleet(WORKER, one_thread))
    count, lag = processes.processes(), processes.fixed_lag
    return FleetSource(learner, env, precision, fleet, processes, count, lag, on_demand)


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
        learner.device,
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
