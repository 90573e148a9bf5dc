# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's source: environment servers -> actor pool -> dynamic batcher -> rollouts.

    environment servers <== gRPC ==> ActorPool --- observations --> DynamicBatcher
                                      |   ^                             |
                                      |   +------ actions ---- inference threads
                                      +--- rollouts --> BatchingQueue --> batches() --> the learner

Spare columns are room in a batch for other data, such as replay. The core writes rollouts into the
first columns, and the consumer writes the spare ones.

The pool runs its own threads in C++. The environment's outputs do not include the last action, so
it is passed along with the agent state and a number of the environment: `agent_state = (state,
last_action, number)`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import libtorchbeast
from torchbeast.collect import contract
from torchbeast.collect.batch_taker import BatchTaker
from torchbeast.core.actors.contract import Actor, Mode, ModelInputs
from torchbeast.core.actors.cuda_graphs import use_cuda_graphs
from torchbeast.core.base.computing import CudaStream
from torchbeast.core.base.nest import map_leaves, map_leaves2
from torchbeast.core.storages.rollout import Rollout
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RepeatedFailures, in_one_line
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import allow_descriptors, available_cores, limit_kept
from torchbeast.fleets.waiting import WAIT_S
from torchbeast.servers.addresses import folder_basename, run_folder, server_addresses
from torchbeast.servers.config import FleetConfig, PipelineConfig, check_streams
from torchbeast.servers.discovery import ServerFleet, Streams
from torchbeast.servers.env_servers import EnvServers, plans_for_local_servers
from torchbeast.servers.joining import JoinServer

_log = logging.getLogger("torchbeast.streams")

_LOOK_S = 1.0  # between two looks whether the run has ended


class PolySource:
    """Yields batches of rollouts from a fleet of environment servers.

    Threads: `start` adds its threads to the supervisor. When the run ends, the supervisor closes
    queue and batcher, which wakes every waiting thread. Several threads may iterate `batches`, each
    with its own iterator.
    """

    def __init__(
        self,
        learner: contract.LearnerInfo,
        fleet: Streams,
        pipeline: PipelineConfig,
        *,
        join_server: JoinServer | None = None,
    ) -> None:
        """Prepares queue, batcher and pool.

        join_server: where hosts dial in, also later. None: the pool connects to the servers.

        Raises UsageError if this process may not have that many streams.
        """
        allow_descriptors()
        check_streams(len(fleet.stream_addresses))
        rollouts, size, spare = learner.rollouts, learner.batch_size, learner.spare_columns
        actor = rollouts.agent.model
        self._learner = learner
        self._join_server = join_server
        self._closed = threading.Event()
        self._num_inference_threads = inference_threads(
            pipeline.num_inference_threads, learner.device
        )
        self._torch_threads = torch.get_num_threads()  # per inference thread
        columns = self._columns = rollout_columns(size, fleet.envs_per_stream)
        self._num_envs = fleet.num_envs
        self._queue = learner_queue(size, pipeline, columns, spare)
        self._batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=None)
        last_action, number = actor.distribution.zero_action((1, 1)), torch.zeros(1, 1).long()
        state = actor.initial_state(1), last_action, number
        self._pool = libtorchbeast.ActorPool(
            rollouts.unroll_length,
            self._queue,
            self._batcher,
            [] if join_server is not None else fleet.stream_addresses,
            map_leaves(lambda leaf: leaf.cpu(), state),
            rollout_columns=columns,
            seed=learner.seed,
            min_streams=pipeline.min_streams or 0,
            credentials=fleet.credentials,
        )
        written, queued = self._num_envs, pipeline.queue_size(size)
        joined = (1 + learner.batches_at_once) * (size + spare)
        self.num_bytes = rollouts.num_bytes(written + queued + joined)  # waiting, or in batches
        self._numbers = itertools.count(1)  # of environments that act for the first time

    def start(self, supervisor: Supervisor) -> None:
        """Starts inference and the pool."""
        supervisor.on_close(self.close)
        actor = self._learner.rollouts.agent.model
        replicas = [copy.deepcopy(actor) for _ in range(self._num_inference_threads)]
        most = self._num_envs if self._join_server is None else 0  # more hosts may join
        use_cuda_graphs(replicas, most)
        for replica in replicas:
            replica.checks_masks = self._join_server is None  # no host may end the run
        for i, replica in enumerate(replicas):
            supervisor.start_thread(f"inference-{i}", functools.partial(self._infer, replica))
        supervisor.start_thread("environments", self._play)
        if (join_server := self._join_server) is not None:
            sizes = self._columns, self._learner.rollouts.num_bytes()
            follow = functools.partial(join_server.follow, self._pool, *sizes, self._closed)
            supervisor.start_thread("hosts", follow)

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts `[T+1, batch_size + spare_columns, ...]` on the CPU, until the source is
        closed.

        Spare columns are uninitialised. The caller writes them, through the tensors or numpy views,
        and must not read them before. final_observation does not have columns; it holds the final
        observations of the first batch_size columns.
        """
        spare = self._learner.spare_columns
        columns = self._learner.batch_size + spare
        for nest, info in self._queue.with_info():
            rollout = _to_rollout(nest, info, spare)
            if not spare:
                rollout = rollout.without_resets()
            if rollout.batch_size < columns:
                break  # closed during the collection of a batch
            yield rollout
        # If the pool fails, it closes the queue before it raises the failure of the run.
        self._closed.wait()

    def close(self) -> None:
        """Closes queue and batcher, which wakes every waiting thread. May be called again."""
        self._closed.set()
        for queue in (self._batcher, self._queue):
            with suppress(RuntimeError):  # already closed, perhaps by the pool
                queue.close()

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Sends options to the environments of every stream, now and whenever one connects."""
        self._pool.set_env_options(json.dumps(dict(options)))

    def status(self) -> dict[str, int]:
        """Returns queue lengths and counts, by the names of log columns.

        Current: rollouts waiting for the learner, streams waiting for actions, connected streams,
        retired streams. Since the start: lost streams, streams that got new environments because
        theirs failed, and collected steps.
        """
        return {
            "learner_queue_size": self._queue.size() * self._columns,
            "inference_queue_size": self._batcher.size(),
            "live_streams": self._pool.live_streams(),
            "lost_streams": self._pool.lost_streams(),
            "restarted_streams": self._pool.restarted_streams(),
            "retired_streams": self._pool.retired_streams(),
            "collected_steps": self._pool.steps(),
        }

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all streams have spent since the start, by stage."""
        return self._pool.seconds()

    def hanging(self) -> str:
        """Describes lost streams that will end the run, or that have been away for over WAIT_S, or
        returns "".

        Steps that take too long are not described, because the pool ends their stream.
        """
        lost_streams = self.lost_streams()
        if not any(stream.shortage or stream.seconds >= WAIT_S for stream in lost_streams):
            return ""
        return contract.describe_lost_streams(lost_streams, self._pool.live_streams())

    def lost_streams(self) -> list[contract.LostStream]:
        """Returns the streams that were lost and have not reconnected."""
        found = self._pool.shortage()
        short = None if found is None else contract.TooFewStreams(*found)
        return [
            contract.LostStream(where, seconds, short, in_one_line(why))
            for where, seconds, why in self._pool.away_streams()
        ]

    def _play(self) -> None:
        failures = RepeatedFailures()
        self._pool.run(lambda report: _log.warning("%s", failures.shortened(report)))

    def _infer(self, replica: Actor) -> None:
        """Answers inference batches, each with one version of the weights."""
        torch.set_num_threads(self._torch_threads)
        learner, extras, version = self._learner, self._learner.rollouts.extras, None
        cuda_stream = CudaStream(learner.device)
        for batch in self._batcher:
            with cuda_stream:
                version = learner.weights.refresh(replica, version)
                inputs = numbered(batch.get_inputs(), self._numbers)
                outputs = answer(replica, cuda_stream, inputs, extras, learner.mode)
            batch.set_outputs(outputs, version)


class _OwnServersSource(PolySource):
    """Starts environment servers for itself. It takes batches in a thread of the supervisor,
    because Ctrl-C does not end a wait in C++.
    """

    def __init__(
        self,
        learner: contract.LearnerInfo,
        fleet: Streams,
        start_servers: Callable[[Supervisor], EnvServers],
    ) -> None:
        """start_servers: called by `start`; others end the servers."""
        super().__init__(learner, fleet, PipelineConfig())
        self._start_servers = start_servers
        self._taking, self._number = BatchTaker(super().batches), 1  # of the next batch

    def start(self, supervisor: Supervisor) -> None:
        """Starts the servers, collecting, and the thread."""
        supervisor.on_close(self.close)  # before the servers end
        self._supervisor, self._servers = supervisor, self._start_servers(supervisor)
        super().start(supervisor)
        supervisor.on_close(self._taking.close)
        supervisor.start_thread("batches", self._taking.run)

    def _play(self) -> None:
        if self._servers.wait_ready():
            super()._play()

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts as PolySource does; an interrupted wait leaves its batch to the next."""
        while True:
            self._taking.ask(self._number)
            while (batch := self._taking.wait(self._number, _LOOK_S)) is None:
                if self._supervisor.ended:
                    return
            self._number += 1
            yield batch


def inference_threads(count: int | None, device: torch.device) -> int:
    """Returns the number of inference threads; count: the setting, None: depends on the hardware.

    On the CPU, acting takes at most 25 % of a step, and more threads only make smaller batches.
    Each thread also uses torch's threads inside its operations.
    """
    if count is not None:
        return count
    on_cpu = max(1, available_cores() // (4 * torch.get_num_threads()))
    return 2 if device.type == "cuda" else on_cpu


def answer(
    replica: Actor, cuda_stream: CudaStream, inputs: Any, extras: Sequence[str], mode: Mode
) -> Any:
    """Returns `((action, extras), (state, action, numbers))` for one batch, on the CPU.

    replica: is on the device of the CUDA stream.
    inputs: `((observation, reward, done, episode_step, episode_return), (state, last_action,
    numbers))` from the actor pool, leaves [1, B, ...] and [layers, B, ...], see `numbered`.
    extras: names of the extras to return, as a dict.
    """
    (observation, reward, done, _, _), (state, last_action, numbers) = inputs
    replica.env_index = numbers[0] - 1
    seen = (observation, reward, done, last_action), state
    model_inputs, state = map_leaves(cuda_stream.to_device, seen)
    acted = replica.act(ModelInputs(*model_inputs), state, mode)
    wanted = {name: acted.extras[name] for name in extras}
    on_host = map_leaves(cuda_stream.to_host, (acted.action, wanted, acted.state))
    cuda_stream.synchronize()
    action, wanted, state = on_host
    return (action, wanted), (state, action, numbers)


def numbered(inputs: Any, new_numbers: Iterator[int]) -> Any:
    """Returns the inputs of `answer`, with the next number for each environment that has 0, because
    it acts for the first time. new_numbers: 1, 2, ...
    """
    env, (state, last_action, numbers) = inputs
    if not numbers.all():
        counted = [number or next(new_numbers) for number in numbers[0].tolist()]
        numbers = torch.tensor([counted], device="cpu")
    return env, (state, last_action, numbers)


def rollout_columns(batch_size: int, envs_per_stream: Iterable[int]) -> int:
    """Returns the number of columns of an item in the learner's queue.

    It is the largest number that divides the batch size and the size of every stream.
    """
    return math.gcd(batch_size, *envs_per_stream)


def learner_queue(
    batch_size: int, pipeline: PipelineConfig, columns: int, spare_columns: int = 0
) -> libtorchbeast.BatchingQueue:
    """Returns a queue of items with `columns` columns. It yields complete batches, with spare
    columns at the end.
    """
    items = batch_size // columns
    capacity = pipeline.queue_size(batch_size)
    return libtorchbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=items,
        maximum_batch_size=items,
        maximum_queue_size=max(items, capacity // columns),
        spare_columns=spare_columns,
    )


def _to_rollout(nest: Any, info: dict[str, Any], spare_columns: int) -> Rollout:
    (env, (action, extras)), (state, last_action, _) = nest
    observation, reward, done, episode_step, episode_return = env
    # The last action that the policy saw. In an environment's first rollout row 0 holds zeros,
    # which are not valid in every action space; in later rollouts this changes nothing.
    map_leaves2(lambda rows, first: rows[0].copy_(first[0]), action, last_action)
    return Rollout(
        observation=observation,
        reward=reward,
        done=done,
        episode_step=episode_step,
        episode_return=episode_return,
        action=action,
        extras=extras,
        initial_agent_state=state,
        truncated=info["truncated"],
        episode_end=info["episode_end"],
        policy_version=info["policy_version"],
        final_observation=map_leaves(
            lambda leaf: leaf[0, : leaf.shape[1] - spare_columns], info["final_observation"]
        ),
        env_index=_in_all_rows(info["stream"], reward, spare_columns),
        rollout_index=_in_all_rows(info["rollout"], reward, spare_columns),
        info=info.get("info", {}),
    )


def _in_all_rows(numbers: Tensor, reward: Tensor, spare_columns: int) -> Tensor:
    """Expands [1, B] to the shape of `reward`: a view, or a copy if there are spare columns, whose
    rows are written one by one.
    """
    rows = numbers.expand(reward.shape)
    return rows.contiguous() if spare_columns else rows


@dataclass(frozen=True, kw_only=True)
class ServedCollection(contract.CollectionPlan):
    """Collects from environment servers, and chooses actions in the learner's process."""

    fleet: ServerFleet
    pipeline: PipelineConfig
    join_server: JoinServer | None = None  # where hosts dial in

    acts_where_it_steps = False
    of_processes = "num_servers"

    def source(self, learner: contract.LearnerInfo, env: EnvSpec, ending: ExitStack) -> PolySource:
        """Makes the source, whose servers are running."""
        return PolySource(learner, self.fleet, self.pipeline, join_server=self.join_server)


@dataclass(frozen=True, kw_only=True)
class StartedServers(contract.CollectionPlan):
    """Collects from environment servers that start and end with the source."""

    config: FleetConfig

    acts_where_it_steps = False
    of_processes = "num_servers"

    def source(self, learner: contract.LearnerInfo, env: EnvSpec, ending: ExitStack) -> PolySource:
        """Makes the source.

        `ending` ends its servers, removes its sockets, and restores the limit of open files.
        """
        ending.enter_context(limit_kept())  # which the source raises
        on_cpu = learner.device.type == "cpu"
        plans = plans_for_local_servers(self.config, disable_cuda=on_cpu)
        folder = ending.enter_context(run_folder())
        addresses = server_addresses(folder_basename(folder), len(plans))
        streams = Streams(  # nobody needs to ask what they serve: it is what the scheme made
            stream_addresses=[
                a for a, p in zip(addresses, plans, strict=True) for _ in range(p.num_streams)
            ],
            envs_per_stream=[p.envs_per_stream for p in plans for _ in range(p.num_streams)],
        )

        def start(supervisor: Supervisor) -> EnvServers:
            servers = EnvServers(supervisor, env, plans, addresses, folder)
            return ending.enter_context(closing(servers))

        return _OwnServersSource(learner, streams, start)
