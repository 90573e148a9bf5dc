# SPDX-License-Identifier: Apache-2.0
"""One worker of a fleet: a group of environments, and a policy that acts in all of them at once.

    start()      makes environments and network
    play()       one rollout, into a shared slot or as arrays           one at a time
    load()       newer weights, which act from the next step on         at any time
                 (workers on the learner's machine read them)
    activity()   current stage, and seconds in each stage               at any time
    place()      where it runs                                          at any time
    end()        ends the present rollout after its current step        at any time
    close()      closes the environments                                after all others

Threads: one calls `start`, `play` and `close`, a second one `load`, a third one the others.
Nothing here knows of Ray.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

from torchbeast.sources.processes.activity import Activity
from torchbeast.sources.processes.fleet import ActivityReport, Failed, Place, Played, Started
from torchbeast.sources.processes.player import Player, acting
from torchbeast.sources.processes.rollout_buffers import SharedRollouts, SlotWriter
from torchbeast.sources.processes.weights import Packed, SentWeights, opened

Sent = tuple[int, Any]
"""A version and its weights, as the fleet sends them; see `RolloutWorker.fetched`."""


class RolloutWorker:
    """Plays rollouts of its environments on request."""

    LANES: ClassVar[Mapping[str, str]] = {
        "load": "weights",
        "activity": "control",
        "place": "control",
        "end": "control",
    }

    def __init__(self, name: str) -> None:
        self._name = name
        self._closing = ExitStack()
        self._begin_again()

    def _begin_again(self) -> None:
        self._activity = Activity()
        self._ended = threading.Event()
        self._sent = SentWeights()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before every line that the worker prints

    def place(self) -> Place:
        """Returns where the worker runs."""
        return Place(socket.gethostname(), os.getpid(), "")

    def fetched(self, weights: Any) -> Packed:
        """Returns the weights behind what the fleet has sent."""
        found: Packed = weights
        return found

    def start(self, arguments: Mapping[str, Any], sent: Sent | None) -> Started | Failed:
        """Makes environments and network.

        arguments: those of `acting`, and mode; first_env, the number of the first environment;
            ring, the RingAddress of the learner's weights, or None; slots, the descriptor of
            rollouts that the worker shares with the learner, or None; num_slots, of these.
        sent: the first weights; None: the worker can read them.
        """
        try:
            return self._start(arguments, sent)
        except Exception as error:
            return Failed.by(error)

    def _start(self, arguments: Mapping[str, Any], sent: Sent | None) -> Started:
        made = self._closing.enter_context(acting(arguments))
        actor = made.rollouts.agent.model
        address = arguments["ring"]
        is_near = address is not None and address.node == self.place().node
        ring = opened(address, actor) if is_near else None
        if ring is None and sent is not None:
            self.load(sent)
        self._arguments, self._loop = arguments, made.loop
        descriptor = arguments["slots"]
        num_slots = 1 if descriptor is None else arguments["num_slots"]
        sizes = arguments["num_envs"], num_slots
        self._rollouts = SharedRollouts(made.rollouts, *sizes, descriptor)
        weights = self._sent if ring is None else ring
        self._player = Player(made.loop, actor, weights, self._activity, arguments["mode"])
        self._activity.enter("queueing")
        return Started(self.activity(), ring is not None)

    def play(
        self, slot: int, rollout: int, wanted: int | None, sent: Sent | None
    ) -> Played | Failed | None:
        """Plays one rollout; None: the worker was asked to end.

        slot: to write it into. The arrays of one that is not shared are overwritten by the next
            call. rollout: its number. wanted: the version of the weights to act with; None: the
            newest at every step. sent: these weights; None: the worker has them.
        """
        try:
            return self._play(slot, rollout, wanted, sent)
        except Exception as error:
            return Failed.by(error)

    def _play(
        self, slot: int, rollout: int, wanted: int | None, sent: Sent | None
    ) -> Played | None:
        if sent is not None:
            self.load(sent)
        arguments, slots = self._arguments, self._rollouts.slots
        arrays = slots[slot % len(slots)]
        writer = SlotWriter(arrays, self._loop.acted.state, arguments["first_env"], rollout)
        length = arguments["unroll_length"]
        if self._player.play(writer, length, wanted, self._goes_on) < length:
            return None
        is_shared = arguments["slots"] is not None
        return Played(None if is_shared else writer.written(), self.activity())

    def _goes_on(self, t: int) -> bool:
        return not self._ended.is_set()

    def load(self, sent: Sent) -> None:
        """Hands over newer weights, which are used from the next step on."""
        version, weights = sent
        self._sent.receive(version, self.fetched(weights))

    def activity(self) -> ActivityReport:
        """Returns the current stage, and totals since the start."""
        return self._activity.report()

    def end(self) -> None:
        """Ends `play` after its current step, and lets no later one begin."""
        self._ended.set()

    def close(self) -> None:
        """Closes the environments; the worker may be started again."""
        self._closing.close()
        self._begin_again()
