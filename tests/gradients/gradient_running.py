# SPDX-License-Identifier: Apache-2.0
"""Gradient workers of the tests, and what they are made of."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learners import impala, ppo

from torchbeast.collect.contract import LearnerInfo
from torchbeast.collect.local import LocalSource
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.envs import make
from torchbeast.fleets.fleet import LocalFleet, WorkerLost
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import environment_of_share
from torchbeast.gradients.config import GradientConfig
from torchbeast.gradients.worker import GradientWorker, WorkerParts
from torchbeast.gradients.workers import WORKER, GradientWorkers, gradient_workers
from torchbeast.seeds import seed_of

T, B, SIZE, ACTIONS = 5, 4, 4, 3
TIMEOUT_S = 60.0


def rollout(seed: int, columns: int = B, **fields: Any) -> Rollout:
    """A rollout of random numbers, some of its episodes ended."""
    numbers = torch.Generator().manual_seed(seed)
    shape = (T + 1, columns)
    nothing = torch.zeros(shape, dtype=torch.bool)
    ended = torch.rand(shape, generator=numbers) < 0.2
    contents: dict[str, Any] = {
        "observation": torch.randn(*shape, SIZE, generator=numbers) * 3 + 1,
        "reward": torch.randn(shape, generator=numbers),
        "done": ended,
        "episode_step": torch.ones(shape, dtype=torch.int32),
        "episode_return": torch.randn(shape, generator=numbers),
        "action": torch.randint(ACTIONS, shape, generator=numbers),
        "extras": {"policy_logits": torch.randn(*shape, ACTIONS, generator=numbers)},
        "initial_agent_state": (),
        "truncated": nothing,
        "episode_end": ended,
        "policy_version": torch.zeros(shape, dtype=torch.int64),
        "final_observation": torch.zeros(0, SIZE),
        "env_index": torch.arange(columns).expand(shape),
        "rollout_index": torch.zeros(shape, dtype=torch.int64),
    }
    return Rollout(**{**contents, **fields})


class GivenSource:
    """Yields given batches, then no more until it is closed."""

    num_bytes = 0

    def __init__(self, batches: Callable[[], Iterator[Rollout]]) -> None:
        self._batches = batches

    def start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def batches(self) -> Iterator[Rollout]:
        yield from self._batches()
        while not self._supervisor.ended:
            time.sleep(0.01)

    def close(self) -> None:
        pass

    def status(self) -> dict[str, float]:
        return {"collected_steps": 7.0}

    def seconds(self) -> dict[str, float]:
        return {"environment": 1.0, "inference": 2.0, "queueing": 3.0}

    def hanging(self) -> str:
        return ""

    def lost_streams(self) -> list[Any]:
        return []


class BadLoss(IMPALA):
    """Fails, as its author did not mean it to."""

    def losses(self, minibatch: Rollout) -> Any:
        if (minibatch.reward == 1234).any():
            raise KeyError("no such head")
        return super().losses(minibatch)


class MeanImpala(IMPALA):
    reduction = "mean"


class TwoSteps(IMPALA):
    """Learns from halves, one after the other."""

    def minibatches(self, batch: Rollout) -> Sequence[Rollout]:
        return batch.split(-(-batch.batch_size // 2))


class NoMinibatches(IMPALA):
    """Its author forgot small batches."""

    def minibatches(self, batch: Rollout) -> Sequence[Rollout]:
        return []


class NotesCounters(TwoSteps):
    """Logs the counters before an update, and a buffer of the actor that follows them."""

    def __init__(self, actor: Any, config: Any) -> None:
        super().__init__(actor, config)
        actor.register_buffer("scheduled", torch.zeros(()))

    def metrics(self, batch: Rollout) -> dict[str, torch.Tensor]:
        noted = {**self.counters.state_dict(), "buffer": self.actor.scheduled.item()}
        del noted["schedule_starts"]
        return {f"noted_{name}": torch.tensor(float(n)) for name, n in noted.items()}

    def schedule(self) -> dict[str, float]:
        self.actor.scheduled.fill_(self.counters.env_steps)
        return {"scheduled": self.actor.scheduled.item()}


def _network() -> MLPNet:
    space = ArraySpec((SIZE,), "float32", -math.inf, math.inf)
    return MLPNet(space, Discrete(ACTIONS), False)


# Made once, before there are threads: they all draw from the one generator of this process, and
# those of an earlier test may still do so.
torch.manual_seed(3)
_INITIAL = _network().state_dict()


@dataclass(frozen=True)
class Learning:
    """How a test's learners are made: by an algorithm's name, and settings."""

    algo: str = "impala"
    settings: tuple[tuple[str, Any], ...] = (("learning_rate", 0.01),)
    kind: type[Any] = IMPALA

    def step(self, **more: Any) -> OptimiserStep[Any]:
        """A learner whose initial weights are always the same, with running statistics."""
        net = _network()
        net.load_state_dict(_INITIAL)
        settings = dict(self.settings) | more
        if self.algo == "ppo":
            return ppo(net, PPO, **settings)
        return impala(net, self.kind, **settings)


PPO_LEARNING = Learning(
    "ppo", (("learning_rate", 0.01), ("num_epochs", 2), ("num_mini_batch", 3)), PPO
)


def of_given(
    index: int,
    ranks: Any,
    stops_early: Any,
    learning: Learning,
    batches: Sequence[Sequence[Rollout]],
) -> WorkerParts:
    """A worker with given batches; batches: by worker."""
    step = learning.step(ranks=ranks)
    torch.manual_seed(100 + index)  # of PPO's shuffles
    return WorkerParts(source=GivenSource(lambda: iter(batches[index])), optimiser_step=step)


def of_given_that_ends(
    index: int,
    ranks: Any,
    stops_early: Any,
    folder: str,
    learning: Learning,
    batches: Sequence[Sequence[Rollout]],
) -> WorkerParts:
    """A worker with given batches, which makes a file when it closes its environments."""
    end = Path(folder, f"{index}").touch
    return replace(of_given(index, ranks, stops_early, learning, batches), end=end)


def of_slow(
    index: int, ranks: Any, stops_early: Any, learning: Learning, batch: Rollout
) -> WorkerParts:
    """Worker 0 has its batch at once; the others never, unless they are stopped."""

    def batches() -> Iterator[Rollout]:
        while True:
            if index == 0:
                yield batch
                continue
            step, done = 0, 0
            while not stops_early(done / T):
                step += 1
                done = min(step, T - 1)  # the last step does not come
                time.sleep(0.001)
            valid = torch.arange(T + 1)[:, None].expand(T + 1, B) <= done
            yield replace(batch, valid=valid, collected=done * B)

    return WorkerParts(source=GivenSource(batches), optimiser_step=learning.step(ranks=ranks))


class SeenSeeds:
    """Catch, but it writes down its seeds."""

    def __init__(self, num_envs: int, folder: str) -> None:
        self._env, self._file = make("Catch", num_envs), Path(folder, f"{os.getpid()}")
        self.observation_space = self._env.observation_space
        self.action_space, self.frame_stack = self._env.action_space, self._env.frame_stack
        self.num_envs = num_envs

    def reset(self, seed: int) -> Any:
        with self._file.open("a") as file:
            file.write(f"{seed}\n")
        return self._env.reset(seed)

    def step(self, action: Any) -> VecStep:
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()


def of_catch(
    index: int, ranks: Any, stops_early: Any, folder: str, algo: str = "ppo", num_envs: int = 4
) -> WorkerParts:
    """A worker that plays Catch in its own process."""
    env = make("Catch", 1)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    torch.manual_seed(seed_of(5, "gradient worker", index))
    learn = ppo if algo == "ppo" else impala
    step = learn(agent.model, learning_rate=0.001, total_steps=10**6, ranks=ranks)
    weights = PublishedWeights(agent.model, step.version)
    learner = LearnerInfo(
        rollouts=RolloutSpec(agent, step.algo.needs, 10),
        batch_size=num_envs,
        weights=weights,
        device=torch.device("cpu"),
        mode="sample",
        precision="float32",
        seed=seed_of(5, "gradient worker", index),
        spare_columns=0,
        batches_at_once=1,
    )
    source = LocalSource(learner, partial(SeenSeeds, folder=folder), num_envs)
    return WorkerParts(source=source, optimiser_step=step, publish=weights.publish, end=source.end)


def as_arrays(step: Any) -> dict[str, np.ndarray]:
    """A copy of all weights and statistics."""
    return {k: v.numpy().copy() for k, v in step.algo.actor.state_dict().items()}


class ThreadWorker:
    """A worker in this process, with a thread for each lane."""

    def __init__(self, name: str) -> None:
        self._worker = GradientWorker(name)
        lanes = {"", *GradientWorker.LANES.values()}
        self.lanes: dict[str, queue.SimpleQueue[Any]] = {
            lane: queue.SimpleQueue() for lane in lanes
        }
        for lane in lanes:
            threading.Thread(target=self._answer, args=(lane,), daemon=True).start()

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        lane = GradientWorker.LANES.get(method, "")
        self.lanes[lane].put((then, pickle.dumps((method, arguments))))

    def kill(self) -> None:
        self._worker.end()
        for lane in self.lanes.values():
            lane.put(None)

    def _answer(self, lane: str) -> None:
        while (request := self.lanes[lane].get()) is not None:
            then, message = request
            method, arguments = pickle.loads(message)
            then(pickle.loads(pickle.dumps(getattr(self._worker, method)(*arguments))))


class ThreadFleet:
    """Workers in this process, for all that needs no process."""

    own_node, host, shares_memory = "", "127.0.0.1", False

    def __init__(self) -> None:
        self.workers: list[ThreadWorker] = []

    def __enter__(self) -> ThreadFleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> ThreadWorker:
        self.workers.append(ThreadWorker(name))
        return self.workers[-1]

    def put(self, value: Any) -> Any:
        return value

    def explain(self, error: WorkerLost, place: Any) -> WorkerLost:
        return error


@contextlib.contextmanager
def running(
    make_worker: Any,
    centre: OptimiserStep[Any],
    *,
    in_processes: bool = False,
    fleet: Any = None,
    **config: Any,
) -> Iterator[tuple[GradientWorkers, Any]]:
    """Gradient workers: of a fleet; without one in threads, or in processes, which ranks need."""
    settings = GradientConfig(**{"num_workers": 2} | config)
    in_processes = in_processes or settings.update_execution == "decentralised"
    own: Any = LocalFleet(WORKER, environment_of_share(1)) if in_processes else ThreadFleet()
    with (
        fleet or own as fleet,
        contextlib.closing(gradient_workers(make_worker, settings, centre, fleet)) as workers,
    ):
        yield workers, fleet


def learnt(workers: GradientWorkers, updates: int) -> list[tuple[Any, dict[str, float]]]:
    """Learns from so many rounds; returns each with its metrics."""
    rounds = workers.batches()
    found = []
    for _ in range(updates):
        batch = next(rounds)
        found.append((batch, workers.update(batch).metrics))
    return found
