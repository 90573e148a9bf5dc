# SPDX-License-Identifier: Apache-2.0
"""Central inference for a scheme: PolyBeast's source, with environment servers that start and end
with it. It needs the compiled libtorchbeast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torchbeast.collect.batch_taker import BatchTaker
from torchbeast.collect.contract import CollectionPlan, LearnerInfo
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.core.storages.rollout import Rollout
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import limit_kept
from torchbeast.servers.addresses import folder_basename, run_folder, server_addresses
from torchbeast.servers.config import FleetConfig, PipelineConfig
from torchbeast.servers.discovery import ServerFleet
from torchbeast.servers.env_servers import EnvServers, ServerPlan, plans_for_local_servers
from torchbeast.servers.source import PolySource

_LOOK_S = 1.0  # between two looks whether the run has ended


@dataclass(frozen=True, kw_only=True)
class StartedServers(CollectionPlan):
    """Collects from environment servers that start and end with the source."""

    config: FleetConfig
    envs: VecEnvFactory

    acts_where_it_steps = False
    of_processes = "num_servers"

    def source(self, learner: LearnerInfo[Any], env: EnvSpec, ending: ExitStack) -> PolySource:
        """Makes the source.

        `ending` ends its servers, removes its sockets, and restores the limit of open files.
        """
        ending.enter_context(limit_kept())  # which the source raises
        on_cpu = learner.device.type == "cpu"
        plans = plans_for_local_servers(self.config, disable_cuda=on_cpu)
        folder = ending.enter_context(run_folder())
        addresses = server_addresses(folder_basename(folder), len(plans))
        servers = functools.partial(
            EnvServers, env=env, plans=plans, addresses=addresses, folder=folder
        )
        fleet = _fleet(self.envs, env, plans, addresses)
        source = _InterruptibleSource(learner, fleet, PipelineConfig(), start_servers=servers)
        ending.callback(source.end)
        return source


class _InterruptibleSource(PolySource):
    """Takes batches in a thread of the supervisor: Ctrl-C does not end a wait in C++."""

    def start(self, supervisor: Supervisor) -> None:
        """Starts collecting, and the thread."""
        super().start(supervisor)
        self._supervisor, self._number = supervisor, 1  # of the next batch
        self._taking = BatchTaker(super().batches)
        supervisor.on_close(self._taking.close)
        supervisor.start_thread("batches", self._taking.run)

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts as PolySource does; an interrupted wait leaves its batch to the next."""
        while True:
            self._taking.ask(self._number)
            while (batch := self._taking.wait(self._number, _LOOK_S)) is None:
                if self._supervisor.ended:
                    return
            self._number += 1
            yield batch


def _fleet(
    envs: VecEnvFactory, env: EnvSpec, plans: Sequence[ServerPlan], addresses: Sequence[str]
) -> ServerFleet:
    """Returns the streams of servers that nobody needs to ask: they make what the scheme made."""
    streams = [
        (address, plan.envs_per_stream)
        for address, plan in zip(addresses, plans, strict=True)
        for _ in range(plan.num_streams)
    ]
    return ServerFleet(
        env=env,
        observation_space=envs.single_frame_space,
        action_space=envs.action_space,
        frame_stack=envs.frame_stack,
        stream_addresses=[address for address, _ in streams],
        envs_per_stream=[size for _, size in streams],
    )
