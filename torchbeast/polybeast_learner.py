# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's learner alone: learns from environment servers that run already.

python -m torchbeast.polybeast_env --num_servers 10          in one terminal
python -m torchbeast.polybeast_learner                       in another
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastLearnerFlags, ServedLearnerGroups
from torchbeast.core.actors.agent import Agent, make_agent
from torchbeast.core.envs.selection import names
from torchbeast.core.envs.spaces import ActionSpace, Discrete
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of
from torchbeast.evaluation.testing import test
from torchbeast.learning.learner_run import Learner, LearnerRun, inference_threads
from torchbeast.learning.reward_clipping import UNKNOWN, resolved
from torchbeast.learning.session import Session, session
from torchbeast.learning.weights import PublishedWeights
from torchbeast.sources.servers.addresses import user_basename

if TYPE_CHECKING:  # the compiled part, whose lack is a sentence of `main`
    from torchbeast.sources.servers.discovery import Fleet
    from torchbeast.sources.servers.source import PolySource, PolySourceConfig

PROGRAM = "polybeast_learner"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; its exit code: 0 done or stopped, 1 failed, 2 wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(PolyBeastLearnerFlags, PROGRAM, argv)))


def run(flags: PolyBeastLearnerFlags) -> int:
    """Trains or tests, as the flags say."""
    if flags.run.mode != "train":
        return test(flags.run, EnvSpec(flags.environment.env or ""))
    from torchbeast.sources.servers.discovery import find

    with session(flags) as parts:
        basename = flags.fleet.pipes_basename or user_basename()
        wanted, patience = flags.fleet.num_actors, flags.fleet.connect_timeout
        fleet = find(basename, wanted, patience, lambda: parts.supervisor.wait(0))
        _check_environment(flags.environment.env, fleet)
        print(_found(fleet), flush=True)
        counted = dataclasses.replace(flags.fleet, num_actors=fleet.num_envs)
        flags = dataclasses.replace(flags, fleet=counted)
        train(PROGRAM, flags, fleet, parts, flags.environment.num_actions)
    return EXIT_DONE


def train(
    program: str,
    flags: ServedLearnerGroups,
    fleet: Fleet,
    parts: Session,
    num_actions: int | None = None,
) -> None:
    """Learns from the fleet until the run ends."""
    from torchbeast.sources.servers.source import PolySource

    env = fleet.env if fleet.env.name else dataclasses.replace(fleet.env, name=UNKNOWN)
    flags = resolved(flags, env.name)
    action_space = _action_space(fleet, num_actions)

    def agent(model: str, reads_values: bool) -> Agent:
        return make_agent(
            model,
            fleet.observation_space,
            action_space,
            fleet.frame_stack,
            flags.model.use_lstm,
            reads_values=reads_values,
        )

    def source(learner: Learner[PublishedWeights]) -> PolySource:
        config = _source_config(flags, learner)
        return PolySource(fleet, learner.agent.model, learner.weights, learner.device, config)

    run = LearnerRun(program, flags, env, parts, names(fleet.observation_space))
    run.train(agent, PublishedWeights, source)


def _source_config(
    flags: ServedLearnerGroups, learner: Learner[PublishedWeights]
) -> PolySourceConfig:
    from torchbeast.sources.servers.source import PolySourceConfig

    threads = inference_threads(flags.pipeline.num_inference_threads, learner.device)
    return PolySourceConfig(
        batch_size=flags.learning.batch_size,
        unroll_length=flags.learning.unroll_length,
        extras=learner.extras,
        mode=learner.mode,
        num_inference_threads=threads,
        max_queue_size=flags.pipeline.max_learner_queue_size,
        seed=learner.seed,
    )


def _action_space(fleet: Fleet, num_actions: int | None) -> ActionSpace:
    """What the servers say; --num_actions where they cannot."""
    if fleet.action_space is not None:
        return fleet.action_space
    if num_actions is None:
        raise UsageError(
            "these servers are the original TorchBeast's and do not tell their actions: "
            "give --num_actions"
        )
    return Discrete(num_actions)


def _found(fleet: Fleet) -> str:
    servers = len(set(fleet.stream_addresses))
    of = f" of {fleet.env.name}" if fleet.env.name else ""
    return f"Found {fleet.num_envs} environments{of}, on {servers} servers."


def _check_environment(env: str | None, fleet: Fleet) -> None:
    served = fleet.env.name
    if env is not None and served and env != served:
        raise UsageError(f"the servers serve {served}, but --env is {env}: leave out --env")


if __name__ == "__main__":
    sys.exit(main())
