# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's learner alone, for environment servers that are already running.

python -m torchbeast.polybeast_env --num_servers 10          in one terminal
python -m torchbeast.polybeast_learner                       in another

On other machines: polybeast_learner --env_servers HOST:PORT --tls_ca FILE --token_file FILE
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastLearnerFlags, ServedLearnerFlags
from torchbeast.cli.learner_settings import run_settings, test_run
from torchbeast.core.actors.agent import Agent, make_agent
from torchbeast.core.envs.selection import names
from torchbeast.core.envs.spaces import ActionSpace, Discrete
from torchbeast.core.specs import ActorSpec
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of
from torchbeast.learning.learner_run import Learner, LearnerRun, Played
from torchbeast.learning.reward_clipping import UNKNOWN
from torchbeast.learning.session import Session, session
from torchbeast.learning.weights import PublishedWeights
from torchbeast.reporting.diagnosis import Collection
from torchbeast.sources.servers.addresses import user_basename
from torchbeast.sources.servers.hosts import hosts

if TYPE_CHECKING:  # compiled; `main` reports its absence
    from torchbeast.sources.servers.discovery import Fleet
    from torchbeast.sources.servers.source import PolySource

PROGRAM = "polybeast_learner"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if done or stopped, 1 if it failed, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(PolyBeastLearnerFlags, PROGRAM, argv)))


def run(flags: PolyBeastLearnerFlags) -> int:
    """Trains or evaluates, as the flags say."""
    if flags.command.mode != "train":
        return test_run(flags, flags.environment.asked)
    find = _finder(flags)
    with session(flags.run.folder, flatten(flags)) as opened:
        fleet = find(stopped=lambda: opened.supervisor.wait(0))
        _check_environment(flags.environment.env, fleet)
        print(_found(fleet), flush=True)
        counted = dataclasses.replace(flags.fleet, num_actors=fleet.num_envs)
        flags = dataclasses.replace(flags, fleet=counted)
        collection = Collection(
            program=PROGRAM, num_actors=fleet.num_envs, processes=None, fixed_lag=None
        )
        train(flags, fleet, opened, collection, flags.environment.num_actions)
    return EXIT_DONE


def _finder(flags: PolyBeastLearnerFlags) -> Callable[..., Fleet]:
    """Returns what asks the servers of the flags, on this machine or on others."""
    from torchbeast.sources.servers.discovery import find, find_on

    served = flags.fleet
    wanted, timeout = served.num_actors, served.connect_timeout
    if served.env_servers is None:
        return functools.partial(find, served.pipes_basename or user_basename(), wanted, timeout)
    return functools.partial(find_on, hosts(served.env_servers), wanted, timeout, flags.security)


def train(
    flags: ServedLearnerFlags,
    fleet: Fleet,
    opened: Session,
    collection: Collection,
    num_actions: int | None = None,
) -> None:
    """Learns from the fleet until the run ends.

    num_actions: for servers that do not describe their actions.
    """
    from torchbeast.sources.servers.source import PolySource

    env = fleet.env if fleet.env.name else dataclasses.replace(fleet.env, name=UNKNOWN)
    action_space = _action_space(fleet, num_actions)

    def agent(spec: ActorSpec) -> Agent:
        return make_agent(spec, fleet.observation_space, action_space, fleet.frame_stack)

    def source(learner: Learner[PublishedWeights]) -> PolySource:
        return PolySource(
            fleet,
            learner.agent.model,
            learner.weights,
            learner.compute.device,
            learner.rollouts,
            flags.pipeline,
            extras=learner.extras,
            mode=learner.mode,
            seed=learner.seed,
            spare_columns=learner.spare_columns,
            num_batches=1 + learner.batches_at_once,
        )

    settings = run_settings(flags, env.name, collection)
    others_serve = collection.processes is None
    seen_keys = names(fleet.observation_space)
    played = Played(env=env, seen_keys=seen_keys, others_serve=others_serve)
    LearnerRun(settings, played, opened).train(agent, PublishedWeights, source)


def _action_space(fleet: Fleet, num_actions: int | None) -> ActionSpace:
    """Returns the action space of the servers, or that of --num_actions if they send none."""
    if fleet.action_space is not None:
        return fleet.action_space
    if num_actions is None:
        raise UsageError(
            "these are servers of the original TorchBeast, which do not send their action space: "
            "give --num_actions"
        )
    return Discrete(num_actions)


def _found(fleet: Fleet) -> str:
    servers = len(set(fleet.stream_addresses))
    what = f" of {fleet.env.name}" if fleet.env.name else ""
    return f"Found {fleet.num_envs} environments{what}, on {servers} servers."


def _check_environment(env: str | None, fleet: Fleet) -> None:
    """Raises UsageError when the servers serve another environment than --env."""
    served = fleet.env.name
    if env is not None and served and env != served:
        raise UsageError(f"the servers serve {served}, but --env is {env}: leave out --env")


if __name__ == "__main__":
    sys.exit(main())
