# SPDX-License-Identifier: Apache-2.0
"""Runs servers and pools in threads of a test for the duration of a `with` block:

>>> with serving(MyEnv, address), playing([address]) as game:
...     item, info = game.rollout()
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from background import SOON, Background, wait_for

from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher, Server, describe

Agent = Callable[[Any], Any]


@contextlib.contextmanager
def serving(env_class: Any, address: str, **options: Any) -> Iterator[Server]:
    """Runs a server at `address`."""
    server = Server(env_class, address, **options)
    run = Background(server.run)
    wait_for(lambda: run.ended or server.wait_until_serving(0.05))
    if run.ended:
        run.result()
    try:
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # the test may have stopped it
            server.stop()
        run.result()


@contextlib.contextmanager
def served_elsewhere(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server in a process of its own, which can be measured alone."""
    code = (
        f"import served_envs, libtorchbeast as l; l.Server(served_envs.Vector, 'unix:{path}').run()"
    )
    where = os.pathsep.join([str(Path(__file__).parents[1] / "libtorchbeast"), *sys.path])
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": where})
    try:
        describe(f"unix:{path}", SOON)
        yield process
    finally:
        process.kill()
        process.wait(SOON)


def zeros_agent(inputs: Any) -> Any:
    """Chooses action 0 in every environment, without a state."""
    (_, reward, *_), _ = inputs
    return (np.zeros(tuple(reward.shape), np.int64),), ()


class Game:
    """A running ActorPool, with a thread that answers inference batches."""

    def __init__(
        self,
        addresses: list[str],
        agent: Agent = zeros_agent,
        *,
        unroll_length: int = 4,
        agent_state: Any = (),
        queue_size: int = 2,
        **options: Any,
    ) -> None:
        self.queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=queue_size)
        self.batcher = DynamicBatcher(minimum_batch_size=1, timeout_ms=10)
        self.pool = ActorPool(
            unroll_length, self.queue, self.batcher, addresses, agent_state, **options
        )
        self._rollouts = self.queue.with_info()
        self._agent = Background(self._answer, agent)
        self.reports: list[str] = []
        self._run = Background(self.pool.run, self.reports.append)

    def rollout(self) -> tuple[Any, Any]:
        """Returns the next rollout, (nest, info); raises the error of run() if none can come."""
        try:
            return next(self._rollouts)
        except StopIteration:
            self.end()
            raise AssertionError("the pool ended in order without a rollout") from None

    def rollouts(self, number: int) -> list[tuple[Any, Any]]:
        return [self.rollout() for _ in range(number)]

    def end(self, timeout: float = SOON) -> None:
        """Waits for run(), and raises its error."""
        self._run.result(timeout)

    def close(self) -> None:
        """Closes batcher and queue, and waits for the agent's thread."""
        for closed in (self.batcher, self.queue):
            with contextlib.suppress(RuntimeError):
                closed.close()
        self._agent.result()

    def _answer(self, agent: Agent) -> None:
        for batch in self.batcher:
            batch.set_outputs(agent(batch.get_inputs()))


@contextlib.contextmanager
def playing(addresses: list[str], agent: Agent = zeros_agent, **options: Any) -> Iterator[Game]:
    """Runs a pool for the duration of the block; raises an unexpected error of run()."""
    game = Game(addresses, agent, **options)
    try:
        yield game
    finally:
        game.close()
    game.end()
