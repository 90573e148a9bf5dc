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

import json
import sys
from collections.abc import Iterator
from typing import Any

from torchbeast.processes.child_main import (
    Report,
    failure,
    follow_parent,
    read_messages,
    take_stdout,
)
from torchbeast.sources.processes.activity import SharedActivities
from torchbeast.sources.processes.player import Player, acting
from torchbeast.sources.processes.rollout_buffers import SharedRollouts, SlotWriter
from torchbeast.sources.processes.shared_weights import SharedWeights

Grant = dict[str, Any]  # {"slot": int, "rollout": int, "version": int | None}


def main(arguments: dict[str, Any]) -> int:
    """Collects until stdin is closed; returns the exit code."""
    follow_parent()
    report = take_stdout()
    grants = read_messages()
    try:
        _act(arguments, grants, report)
    except Exception as error:
        report(failure(error))
        return 1
    return 0


def _act(arguments: dict[str, Any], grants: Iterator[Grant], report: Report) -> None:
    with acting(arguments) as made:
        loop, actor = made.loop, made.rollouts.agent.model
        weights = SharedWeights(actor, size=arguments["ring_size"], descriptor=arguments["weights"])
        sizes = arguments["num_envs"], arguments["num_slots"]
        rollouts = SharedRollouts(made.rollouts, *sizes, arguments["rollouts"])
        count, descriptor = arguments["num_activities"], arguments["activities"]
        activity = SharedActivities(count, descriptor).of(arguments["index"])
        activity.enter("queueing")
        player = Player(loop, actor, weights, activity, arguments["mode"])
        for grant in grants:
            slot, first_env = rollouts.slots[grant["slot"]], arguments["first_env"]
            writer = SlotWriter(slot, loop.acted.state, first_env, grant["rollout"])
            player.play(writer, arguments["unroll_length"], grant["version"])
            report({"slot": grant["slot"]})


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
