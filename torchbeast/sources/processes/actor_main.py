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

import contextlib
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from torchbeast.core.actors.agent import make_agent
from torchbeast.core.actors.contract import Actor, Mode
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.precision import dtype_for
from torchbeast.core.specs import ActorSpec
from torchbeast.envs.opening import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.processes.child_main import Report, failure, take_stdin, take_stdout
from torchbeast.processes.malloc import keep_freed_memory
from torchbeast.seeds import seed_of
from torchbeast.sources.processes.activity import Activity, SharedActivities
from torchbeast.sources.processes.rollout_buffers import SharedRollouts, SlotWriter
from torchbeast.sources.processes.shared_weights import SharedWeights

_GRACE_S = 3.0  # for the current step once stdin is closed; a stuck environment is abandoned

Grant = dict[str, Any]  # {"slot": int, "rollout": int, "version": int | None}


class Player:
    """Plays its environments continuously, one rollout at a time."""

    def __init__(
        self, loop: EnvLoop, actor: Actor, weights: SharedWeights, activity: Activity, mode: Mode
    ) -> None:
        self._loop, self._actor, self._weights = loop, actor, weights
        self._activity = activity
        self._mode: Mode = mode
        self._version: int | None = None
        self._acted_with: int | None = None

    def play(self, writer: SlotWriter, unroll_length: int, wanted: int | None) -> None:
        """Writes one rollout; its row 0 repeats the last row of the previous one.

        wanted: the version of the weights to act with; None: the newest at every step.
        """
        loop, activity = self._loop, self._activity
        if self._acted_with is None:  # the very first row 0: no weights have acted yet
            self._acted_with = self._weights.version if wanted is None else wanted
        writer.write(0, loop.row, loop.acted, self._acted_with)
        for t in range(1, unroll_length + 1):
            activity.enter("inference")
            self._version = self._weights.refresh(self._actor, self._version, wanted)
            self._acted_with = self._version
            loop.act(self._mode)
            activity.enter("environment")
            loop.step()
            activity.count(len(loop.row.reward))
            writer.write(t, loop.row, loop.acted, self._acted_with)
        activity.enter("queueing")


def main(arguments: dict[str, Any]) -> int:
    """Collects until stdin is closed; returns the exit code."""
    report = take_stdout()
    grants = _read_grants()
    try:
        _act(arguments, grants, report)
    except Exception as error:
        report(failure(error))
        return 1
    return 0


def _act(arguments: dict[str, Any], grants: Iterator[Grant], report: Report) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)  # there is a process for every core
    torch.manual_seed(seed_of(arguments["seed"], "actions"))
    num_envs, unroll_length = arguments["num_envs"], arguments["unroll_length"]
    with closing(make_environment(EnvSpec.from_parent(arguments["env"]), num_envs)) as env:
        space = env.observation_space
        spec = ActorSpec.from_parent(arguments["actor"])
        actor = make_agent(spec, space, env.action_space, env.frame_stack).model
        actor.compute_dtype = dtype_for(arguments["precision"], torch.device("cpu"))
        weights = SharedWeights(actor, size=arguments["ring_size"], descriptor=arguments["weights"])
        rollouts = SharedRollouts(
            actor,
            stacked_space(space, env.frame_stack),
            arguments["extras"],
            unroll_length,
            num_envs,
            arguments["num_slots"],
            arguments["rollouts"],
        )
        seed = seed_of(arguments["seed"], "environments")
        loop = EnvLoop(env, actor, seed)
        count, descriptor = arguments["num_activities"], arguments["activities"]
        activity = SharedActivities(count, descriptor).of(arguments["index"])
        activity.enter("queueing")
        player = Player(loop, actor, weights, activity, arguments["mode"])
        for grant in grants:
            slot, first_env = rollouts.slots[grant["slot"]], arguments["first_env"]
            writer = SlotWriter(slot, loop.acted.state, first_env, grant["rollout"])
            player.play(writer, unroll_length, grant["version"])
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
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    until_ended = itertools.takewhile(lambda _: not ended.is_set(), iter(lines.get, b""))
    return map(json.loads, until_ended)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(json.loads(sys.argv[1])))
