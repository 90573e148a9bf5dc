# SPDX-License-Identifier: Apache-2.0
"""A worker of a fleet: a group of environments, and a policy that acts in all of them together.

    start()      makes environments and network
    play()       one rollout, into a shared slot or as arrays           one at a time
    load()       newer weights, used from the next step on              at any time
                 (workers on the learner's machine read them instead)
    activity()   current stage, and seconds in each stage               at any time
    place()      where it runs                                          at any time
    end()        ends the rollout after its current step                at any time
    set_options() options for the next resets of environments           at any time
    close()      closes the environments                                after all others

Threads: one thread calls `start`, `play` and `close`, a second one `load`, a third one the others.
This module does not know about Ray.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any, ClassVar, NamedTuple

import torch

from torchbeast.collect.contract import Weights
from torchbeast.collect.rollout_buffers import SharedRollouts, SlotWriter
from torchbeast.collect.weights import Packed, SentWeights, opened
from torchbeast.core.actors.contract import Mode
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.contract import give_options
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.fleet import FleetWorker, returning_failures
from torchbeast.fleets.system import keep_freed_memory
from torchbeast.fleets.waiting import running_time
from torchbeast.seeds import seed_of

STAGES = ("environment", "inference", "queueing", "starting")


class ActivityReport(NamedTuple):
    """A worker's current stage, and the time that it has spent in each stage since it started."""

    stage: str
    seconds_in_stage: float
    seconds: dict[str, float]  # by stage; "computing": of the process, on all cores together
    steps: int  # of all its environments


class Started(NamedTuple):
    """A worker has made its environments and its network."""

    activity: ActivityReport
    reads_weights: bool  # from the learner's memory, so the learner need not send them


class PlayedRollout(NamedTuple):
    """One rollout."""

    arrays: Any  # None: the arrays are in a slot that the worker shares with the source
    activity: ActivityReport


class StageClock:
    """Counts the time spent in each stage. The thread that plays writes it, any thread may read."""

    def __init__(self, now: Callable[[], float] = running_time) -> None:
        """Starts in the stage "starting"."""
        self._now = now
        self._present = "starting", now()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._steps = 0

    def enter(self, stage: str) -> None:
        """Records a change to this stage."""
        (before, since), now = self._present, self._now()
        self._seconds[before] += now - since
        self._present = stage, now

    def count(self, steps: int) -> None:
        """Adds to the number of steps."""
        self._steps += steps

    def report(self) -> ActivityReport:
        """Returns the current stage, its seconds so far, and the totals of the completed stages."""
        stage, since = self._present
        seconds = {**self._seconds, "computing": time.process_time()}
        return ActivityReport(stage, self._now() - since, seconds, self._steps)


Sent = tuple[int, Any]
"""A version and its weights, as the fleet sends them; see `RolloutWorker.fetched`."""


class RolloutWorker(FleetWorker):
    """Plays rollouts of its environments on request."""

    LANES: ClassVar[Mapping[str, str]] = {
        "load": "weights",
        **dict.fromkeys(("activity", "place", "end", "set_options"), "control"),
    }

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._begin_again()

    def _begin_again(self) -> None:
        self._stage_clock = StageClock()
        self._ended = threading.Event()
        self._sent = SentWeights()
        self._loop: EnvLoop | None = None
        self._options: Mapping[str, Any] | None = None

    def fetched(self, weights: Packed) -> Packed:
        """Returns the weights to which a reference of the fleet refers."""
        return weights

    @returning_failures
    def start(self, arguments: Mapping[str, Any], sent: Sent | None) -> Started:
        """Makes environments and network.

        arguments: the arguments of `_acting`, and mode; first_env, the number of the first
            environment; ring, the RingAddress of the learner's weights, or None; slots, the
            descriptor of rollouts that the worker shares with the learner, or None; num_slots,
            the number of rollouts that it has room for.
        sent: the first weights; None: the worker can read them itself.
        """
        loop, rollouts = _acting(arguments, self._closing)
        actor = rollouts.agent.model
        address = arguments["ring"]
        is_near = address is not None and address.node == self.place().node
        ring = opened(address, actor) if is_near else None
        if ring is None and sent is not None:
            self.load(sent)
        self._arguments, self._loop = arguments, loop
        if self._options is not None:  # newer ones came during the start
            give_options(loop.env, self._options)
        sizes = arguments["num_envs"], arguments["num_slots"]
        self._rollouts = SharedRollouts(rollouts, *sizes, arguments["slots"])
        weights = self._sent if ring is None else ring
        self._player = Player(loop, weights, self._stage_clock, arguments["mode"])
        self._stage_clock.enter("queueing")
        return Started(self.activity(), ring is not None)

    @returning_failures
    def play(
        self, slot: int, rollout: int, wanted: int | None, sent: Sent | None
    ) -> PlayedRollout | None:
        """Plays one rollout. Returns None if `end` was called.

        slot: number of the slot for the rollout. If slots are not shared, the next call overwrites
            the returned arrays. rollout: its number. wanted: version of the weights to act with;
            None: the newest version at every step. sent: these weights; None: the worker has them.
        """
        if sent is not None:
            self.load(sent)
        arguments, slots = self._arguments, self._rollouts.slots
        arrays = slots[slot % len(slots)]
        assert self._loop is not None
        writer = SlotWriter(arrays, self._loop.acted.state, arguments["first_env"], rollout)
        played = self._player.play(writer, wanted, lambda t: not self._ended.is_set())
        if played < writer.unroll_length:
            return None
        is_shared = arguments["slots"] is not None
        return PlayedRollout(None if is_shared else writer.written(), self.activity())

    def load(self, sent: Sent) -> None:
        """Receives newer weights, which `play` uses from the next step on."""
        version, weights = sent
        self._sent.receive(version, self.fetched(weights))

    @returning_failures
    def set_options(self, options: Mapping[str, Any]) -> None:
        """Gives the environments options for their next resets."""
        self._options = options
        if self._loop is not None:
            give_options(self._loop.env, options)

    def activity(self) -> ActivityReport:
        """Returns the current stage and the totals since the start."""
        return self._stage_clock.report()

    def end(self) -> None:
        """Ends `play` after its current step, and every later call immediately."""
        self._ended.set()

    def close(self) -> None:
        """Closes the environments. The worker can be started again."""
        super().close()
        self._begin_again()


def _acting(arguments: Mapping[str, Any], ending: ExitStack) -> tuple[EnvLoop, RolloutSpec]:
    """Makes the environments and the network of a process; `ending` closes the environments.

    Sets torch's number of threads and random seed, and options of malloc, for the whole process.

    arguments: env and actor, the JSON of their specs from the parent process; precision, of the
        features; num_envs; extras and unroll_length, of the rollouts; seed, of this process;
        options, for the resets of the environments, which may be missing.
    """
    keep_freed_memory()
    torch.set_num_threads(1)  # there is one process per core
    torch.manual_seed(seed_of(arguments["seed"], "actions"))
    env_spec = EnvSpec.from_parent(arguments["env"])
    with ExitStack() as made:  # closed at once if anything fails
        env = made.enter_context(closing(make_environment(env_spec, arguments["num_envs"])))
        if (options := arguments.get("options")) is not None:
            give_options(env, options)
        spec = ActorSpec.from_parent(arguments["actor"])
        agent = make_agent(spec, env.observation_space, env.action_space, env.frame_stack)
        actor = agent.model
        actor.set_precision(arguments["precision"], torch.device("cpu"))
        seed = seed_of(arguments["seed"], "environments")
        loop = EnvLoop(env, actor, seed, arguments["first_env"])
        ending.enter_context(made.pop_all())
    length, keywords = arguments["unroll_length"], env_spec.options.info_keywords
    return loop, RolloutSpec(agent, arguments["extras"], length, keywords)


class Player:
    """Plays its environments continuously, one rollout at a time."""

    def __init__(self, loop: EnvLoop, weights: Weights, clock: StageClock, mode: Mode) -> None:
        self._loop, self._actor, self._weights = loop, loop.actor, weights
        self._stage_clock = clock
        self._mode: Mode = mode
        self._version: int | None = None
        self._acted_with: int | None = None

    def play(self, writer: SlotWriter, wanted: int | None, goes_on: Callable[[int], bool]) -> int:
        """Writes one rollout; its row 0 repeats the last row of the previous one.

        wanted: version of the weights to act with; None: the newest version at every step. goes_on:
        called with t before the step to row t + 1. If it returns False, the rollout ends, and its
        remaining rows repeat row t.

        Returns the number of steps: the unroll length, unless goes_on ended the rollout earlier.
        """
        loop, clock = self._loop, self._stage_clock
        if self._acted_with is None:  # the very first row 0: no weights have acted yet
            self._acted_with = self._weights.version if wanted is None else wanted
        writer.write(0, loop.row, loop.acted, self._acted_with)
        t = 0
        while t < writer.unroll_length and goes_on(t):
            t += 1
            clock.enter("inference")
            self._version = self._weights.refresh(self._actor, self._version, wanted)
            self._acted_with = self._version
            loop.act(self._mode)
            clock.enter("environment")
            clock.count(loop.step())
            writer.write(t, loop.row, loop.acted, self._acted_with)
        if t < writer.unroll_length:
            writer.repeat(t)
        clock.enter("queueing")
        return t
