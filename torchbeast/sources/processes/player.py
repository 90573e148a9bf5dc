# SPDX-License-Identifier: Apache-2.0
"""Plays environments rollout by rollout; shared by MonoBeast's actor processes and Ray's actors.

    with acting(arguments) as made:
        player = Player(made.loop, made.rollouts.agent.model, weights, activity, mode)
        player.play(SlotWriter(...), unroll_length, wanted=None)       again and again

The E environments of a process are stepped together, and one forward pass chooses all their
actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import torch

from torchbeast.core.actors.contract import Actor, Mode
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.device import dtype_for
from torchbeast.core.specs import ActorSpec
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.processes.system import keep_freed_memory
from torchbeast.seeds import seed_of
from torchbeast.sources.contract import Weights
from torchbeast.sources.processes.activity import Activity
from torchbeast.sources.processes.rollout_buffers import SlotWriter


class Acting(NamedTuple):
    """The environments of one process, and the agent that acts in them."""

    loop: EnvLoop
    rollouts: RolloutSpec  # that they play


@contextmanager
def acting(arguments: Mapping[str, Any]) -> Iterator[Acting]:
    """Makes the environments and the network of a process, and closes the environments again.

    Sets torch's number of threads and random numbers, and malloc, for the whole process.

    arguments: env and actor, the JSON of their specs, from the parent; precision, of features;
        num_envs; extras and unroll_length, of its rollouts; seed, of this process alone.
    """
    keep_freed_memory()
    torch.set_num_threads(1)  # there is a process for every core
    torch.manual_seed(seed_of(arguments["seed"], "actions"))
    env_spec = EnvSpec.from_parent(arguments["env"])
    with closing(make_environment(env_spec, arguments["num_envs"])) as env:
        spec = ActorSpec.from_parent(arguments["actor"])
        agent = make_agent(spec, env.observation_space, env.action_space, env.frame_stack)
        actor = agent.model
        actor.compute_dtype = dtype_for(
            arguments["precision"], torch.device("cpu"), actor.feature_weights()
        )
        loop = EnvLoop(env, actor, seed_of(arguments["seed"], "environments"))
        length, keywords = arguments["unroll_length"], env_spec.options.info_keywords
        yield Acting(loop, RolloutSpec(agent, arguments["extras"], length, keywords))


class Player:
    """Plays its environments continuously, one rollout at a time."""

    def __init__(
        self, loop: EnvLoop, actor: Actor, weights: Weights, activity: Activity, mode: Mode
    ) -> None:
        self._loop, self._actor, self._weights = loop, actor, weights
        self._activity = activity
        self._mode: Mode = mode
        self._version: int | None = None
        self._acted_with: int | None = None

    def play(
        self,
        writer: SlotWriter,
        unroll_length: int,
        wanted: int | None,
        goes_on: Callable[[int], bool] = lambda t: True,
    ) -> int:
        """Writes one rollout; its row 0 repeats the last row of the previous one.

        wanted: the version of the weights to act with; None: the newest at every step. goes_on: is
        asked with t before the step to row t + 1; where it says no the rollout ends, and its other
        rows repeat row t.

        Returns the number of steps, the unroll length unless the rollout ended before.
        """
        loop, activity = self._loop, self._activity
        if self._acted_with is None:  # the very first row 0: no weights have acted yet
            self._acted_with = self._weights.version if wanted is None else wanted
        writer.write(0, loop.row, loop.acted, self._acted_with)
        t = 0
        while t < unroll_length and goes_on(t):
            t += 1
            activity.enter("inference")
            self._version = self._weights.refresh(self._actor, self._version, wanted)
            self._acted_with = self._version
            loop.act(self._mode)
            activity.enter("environment")
            loop.step()
            activity.count(len(loop.row.reward))
            writer.write(t, loop.row, loop.acted, self._acted_with)
        if t < unroll_length:
            writer.repeat(t)
        activity.enter("queueing")
        return t
