# SPDX-License-Identifier: Apache-2.0
"""An agent that is killed at a chosen moment: `python -m replay_agent PATH MOMENT`.

It kills itself by SIGKILL, so nothing of it can tell the service anything.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from shared_running import joining
from true_rows import Envs, empty_batch, fields

from torchbeast.collect.replay import JoinRequest
from torchbeast.collect.shared_replay import SharedReplayClient

T, B, S, K = 4, 3, 5, 2
COUNT = 30  # insertions before it dies
MOMENTS = [
    "joined",
    "before an insertion",
    "within an insertion",
    "before the answer",
    "at the end",
]


def how(name: str) -> JoinRequest:
    return joining(fields(T, 1, K), B, S, name, frame_stack=K)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: Path, moment: str) -> None:
    agent = SharedReplayClient(str(path), how("dying"))
    if moment == "joined":
        die()
    envs = Envs(0, T, K)
    batches = [envs.batch([envs.next_rollout(0, i) for i in range(B)]) for _ in range(COUNT + 1)]
    for batch in batches[:-1]:
        agent.insert(batch)
        agent.fill(empty_batch(T, B + S, K), slice(B, B + S), first_walk=0)
    _arrange(agent, moment)
    agent.insert(batches[-1])
    die()


def _arrange(agent: Any, moment: str) -> None:
    """Lets the next insertion die at a moment."""
    if moment == "before an insertion":
        die()
    if moment == "within an insertion":
        request = bytes(pickle.dumps(("insert", ([], None))))
        length = len(request).to_bytes(4, "big")
        os.write(agent._connection.fileno(), length + request[: len(request) // 2])
        die()
    if moment == "before the answer":
        agent._connection.poll = lambda timeout: die()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
