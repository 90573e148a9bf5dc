# SPDX-License-Identifier: Apache-2.0
"""The main module of MonoBeast's actor processes; started by source.py, never by a user.

    stdin   one line of JSON for each rollout to be written: the slot, the rollout's number, and
            the version of the weights to act with (null: always the newest). The process ends when
            stdin is closed, which also happens when the program dies, by whatever signal.
    stdout  one line of JSON for each written rollout: the slot

The E environments of the process are stepped together, and one forward pass chooses all their
actions. Weights, rollouts and the activity of the process (see activity.py) are in shared memory.
"""

from __future__ import annotations

import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from torchbeast.processes.child_main import (
    Report,
    exit_now,
    failure,
    follow_parent,
    take_stdin,
    take_stdout,
)
from torchbeast.sources.processes.activity import SharedActivities
from torchbeast.sources.processes.player import Player, acting
from torchbeast.sources.processes.rollout_buffers import SharedRollouts, SlotWriter
from torchbeast.sources.processes.shared_weights import SharedWeights

_GRACE_S = 3.0  # for the current step once stdin is closed; a stuck environment is abandoned

Grant = dict[str, Any]  # {"slot": int, "rollout": int, "version": int | None}


def main(arguments: dict[str, Any]) -> int:
    """Collects until stdin is closed; returns the exit code."""
    follow_parent()
    report = take_stdout()
    grants = _read_grants()
    try:
        _act(arguments, grants, report)
    except Exception as error:
        report(failure(error))
        return 1
    return 0


def _act(arguments: dict[str, Any], grants: Iterator[Grant], report: Report) -> None:
    with acting(arguments) as made:
        actor, loop, observation_space, frame_stack, info_keywords = made
        weights = SharedWeights(actor, size=arguments["ring_size"], descriptor=arguments["weights"])
        rollouts = SharedRollouts(
            actor,
            observation_space,
            arguments["extras"],
            arguments["unroll_length"],
            arguments["num_envs"],
            arguments["num_slots"],
            arguments["rollouts"],
            frame_stack,
            info_keywords,
        )
        count, descriptor = arguments["num_activities"], arguments["activities"]
        activity = SharedActivities(count, descriptor).of(arguments["index"])
        activity.enter("queueing")
        player = Player(loop, actor, weights, activity, arguments["mode"])
        for grant in grants:
            slot, first_env = rollouts.slots[grant["slot"]], arguments["first_env"]
            writer = SlotWriter(slot, loop.acted.state, first_env, grant["rollout"])
            player.play(writer, arguments["unroll_length"], grant["version"])
            report({"slot": grant["slot"]})


def _read_grants() -> Iterator[Grant]:
    """Yields grants until stdin is closed; those not yet begun are then dropped.

    A thread reads stdin, so that its end is noticed during a rollout too.
    """
    stdin = take_stdin()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    ended = threading.Event()

    def read() -> None:
        for line in stdin:
            lines.put(line)
        ended.set()
        lines.put(b"")
        time.sleep(_GRACE_S)
        exit_now(0)

    threading.Thread(target=read, daemon=True).start()
    until_ended = itertools.takewhile(lambda _: not ended.is_set(), iter(lines.get, b""))
    return map(json.loads, until_ended)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
