# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's learner alone, for environment servers that are already running.

python -m torchbeast.polybeast_env --num_servers 10          in one terminal
python -m torchbeast.polybeast_learner                       in another

On other machines: polybeast_learner --env_servers HOST:PORT --tls_ca FILE --token_file FILE
Hosts that dial in: polybeast_learner --listen HOST:PORT --tls_cert FILE --tls_key FILE \\
    --token_file FILE
Several that learn as one: torchrun --nproc_per_node=2 -m torchbeast.polybeast_learner
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchbeast.cli.command_line import flatten, parse, run_with
from torchbeast.cli.flags import PolyBeastLearnerFlags, ServedLearnerFlags
from torchbeast.cli.learner_settings import run_settings, test_run
from torchbeast.core.actors.registry import Agent, make_agent
from torchbeast.core.envs.selection import names
from torchbeast.core.envs.spaces import ActionSpace, Discrete
from torchbeast.core.specs import ActorSpec
from torchbeast.core.wording import counted
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of
from torchbeast.learning.collection import served_source
from torchbeast.learning.config import UNKNOWN
from torchbeast.learning.learner_run import Learner, LearnerRun, Played
from torchbeast.learning.session import Session, session
from torchbeast.learning.training import DONE
from torchbeast.learning.weights import PublishedWeights
from torchbeast.processes.supervisor import Supervisor, end_program
from torchbeast.processes.system import launched
from torchbeast.reporting.diagnosis import Collection
from torchbeast.reporting.waiting import say
from torchbeast.sources.servers.addresses import hosts, server_addresses, user_basename
from torchbeast.sources.servers.config import ServedFleetConfig
from torchbeast.sources.servers.security import credentials, flags_of_others, silence_grpc

if TYPE_CHECKING:  # compiled; `main` reports its absence
    from torchbeast.learning.replicas import Replica
    from torchbeast.sources.servers.discovery import Fleet
    from torchbeast.sources.servers.door import HostDoor
    from torchbeast.sources.servers.source import PolySource

PROGRAM = "polybeast_learner"
_SERVERS = "the servers"  # what rank 0 tells the others
_PAUSE_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if done or stopped, 1 if it failed, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: Sequence[str]) -> int:
    """Runs alone, or as one of the learners that torchrun has started."""
    launch = launched()
    if launch is None:
        return run_with(_parse(argv), run)
    from torchbeast.learning.replicas import replica

    with replica(launch) as among, among.words(argv, lambda words: _parse(words).run) as words:
        return run_with(_parse(words), functools.partial(run, replica=among))


def _parse(argv: Sequence[str]) -> PolyBeastLearnerFlags:
    return parse(PolyBeastLearnerFlags, PROGRAM, argv)


def run(flags: PolyBeastLearnerFlags, replica: Replica | None = None) -> int:
    """Trains or evaluates, as the flags say.

    replica: this process among several learners; None: it is the only one.
    """
    if replica is not None:
        _check_shared(flags, replica)
    if flags.command.mode != "train":
        return test_run(flags, flags.environment.asked)
    import torchbeast.sources.servers.discovery  # noqa: F401 - raises at once if not built

    silence_grpc()
    is_kept = replica is None or replica.leads
    _check_files(flags)
    with (
        session(flags.run.folder, flatten(flags), is_kept) as opened,
        _door(flags, opened.supervisor, replica) as door,
    ):
        find = _finder(flags, door, replica)
        if replica is None:
            fleet = find(check_goes_on=opened.supervisor.check_goes_on)
        else:
            fleet = _found_together(find, flags, replica, opened.supervisor)
        _check_environment(flags.environment.env, fleet)
        say(found(fleet))
        of_command = _of_command(flags.fleet)
        served = dataclasses.replace(flags.fleet, num_actors=fleet.num_envs)
        flags = dataclasses.replace(flags, fleet=served)
        collection = Collection(
            program=PROGRAM, num_actors=fleet.num_envs, processes=None, fixed_lag=None
        )
        train(
            flags,
            fleet,
            opened,
            collection,
            flags.environment.num_actions,
            replica,
            door=door,
            of_command=of_command,
        )
    return EXIT_DONE


def _of_command(served: ServedFleetConfig) -> list[str]:
    """Returns for how many environments a run waits that hosts dial in to: it records how many
    there were.
    """
    if served.listen is None or served.num_actors is None:
        return []
    return ["--num_actors", str(served.num_actors)]


def _check_shared(flags: PolyBeastLearnerFlags, replica: Replica) -> None:
    """Raises UsageError for flags with which several learners cannot run."""
    if flags.command.mode != "train":
        raise UsageError(
            f"--mode {flags.command.mode} plays in one process, but torchrun started "
            f"{replica.size}: start it without torchrun"
        )
    served = flags.fleet
    if served.env_servers is None and served.listen is None and not replica.on_one_machine:
        raise UsageError(
            "learners on several machines cannot share servers that only one of them reaches: give "
            "--env_servers or --listen, or start all learners on one machine"
        )
    replica.check_can_share(flags.rollouts, flags.replay, flags.hardware)
    replica.check_same(flatten(flags))


def _found_together(
    find: Callable[..., Fleet],
    flags: PolyBeastLearnerFlags,
    replica: Replica,
    supervisor: Supervisor,
) -> Fleet:
    """Returns the fleet of all learners: rank 0 asks the servers, and tells the others.

    Where hosts dial in, each learner has its own, which must serve the same as those of rank 0.
    """
    has_own = flags.fleet.listen is not None
    own = find(check_goes_on=supervisor.check_goes_on) if has_own or replica.leads else None
    if own is not None and replica.leads:
        replica.ranks.tell(_SERVERS, json.dumps(own.descriptions))
        return own
    from torchbeast.core.algos.torch_ranks import TIMEOUT_S
    from torchbeast.sources.servers.discovery import check_same, fleet_of

    limit = flags.fleet.connect_timeout + TIMEOUT_S  # rank 0 has the first for its hosts
    told = replica.ranks.told(_SERVERS, lambda: supervisor.wait(_PAUSE_S), limit)
    supervisor.check_goes_on()
    theirs = json.loads(told)
    if own is not None:
        name, said = next(iter(own.descriptions.items()))
        first, wanted = next(iter(theirs.items()))
        check_same(first, wanted, name, json.loads(json.dumps(said)))  # tuples become lists
        return own
    reaches_out = flags.fleet.env_servers is not None
    return fleet_of(theirs, credentials(flags.security_of_servers()) if reaches_out else None)


def _check_files(flags: PolyBeastLearnerFlags) -> None:
    """Raises UsageError for files of this command that cannot be used."""
    if flags.fleet.listen is not None:
        credentials(flags.security.listening())
    if flags.fleet.env_servers is not None:
        credentials(flags.security_of_servers())


@contextmanager
def _door(
    flags: PolyBeastLearnerFlags, supervisor: Supervisor, replica: Replica | None
) -> Iterator[HostDoor | None]:
    """Lets hosts dial in for the duration of the block; yields None without --listen.

    Each of several learners on a machine listens at a port of its own: that of --listen plus its
    number there.
    """
    from torchbeast.sources.servers.door import HostDoor

    if flags.fleet.listen is None:
        yield None
        return
    number, count = (0, 1) if replica is None else (replica.local_rank, replica.local_size)
    doors = server_addresses(flags.fleet.listen, count)
    opened = HostDoor(doors[number], flags.security.listening())
    try:
        others = flags_of_others("--learner", doors, flags.security)
        say(f"Waiting for hosts at {doors[0]}: python -m torchbeast.polybeast_env {others}")
        yield opened
    finally:
        opened.close(run_has_ended=supervisor.reason == DONE and supervisor.failure is None)


def _finder(
    flags: PolyBeastLearnerFlags, door: HostDoor | None, replica: Replica | None
) -> Callable[..., Fleet]:
    """Returns what finds the servers of the flags: on this machine, on others, or of hosts that
    dial in.
    """
    from torchbeast.sources.servers.discovery import find

    served = flags.fleet
    wanted, timeout = served.num_actors, served.connect_timeout
    if door is not None:
        own = wanted if wanted is None or replica is None else -(-wanted // replica.size)
        return functools.partial(door.find, own, timeout)
    if served.env_servers is None:
        basename = served.pipes_basename or user_basename()
        return functools.partial(find, [basename], wanted, timeout, None)
    named, security = hosts(served.env_servers), flags.security_of_servers()
    return functools.partial(find, named, wanted, timeout, security)


def train(
    flags: ServedLearnerFlags,
    fleet: Fleet,
    opened: Session,
    collection: Collection,
    num_actions: int | None = None,
    replica: Replica | None = None,
    *,
    door: HostDoor | None = None,
    of_command: Sequence[str] = (),
) -> None:
    """Learns from the fleet until the run ends.

    num_actions: for servers that do not describe their actions. replica: this process among several
    learners, each of which gets a share of the fleet's streams; None: it is the only one. door:
    where hosts dial in; they have dialled in to this learner, so its fleet is not shared out.
    of_command: see `RunSettings`.
    """
    env = fleet.env if fleet.env.name else dataclasses.replace(fleet.env, name=UNKNOWN)
    action_space = _action_space(fleet, num_actions)
    own, pipeline = fleet, flags.pipeline
    if door is None:
        pipeline.check_enough(len(fleet.stream_addresses))  # refused before anything is said
        own = fleet if replica is None else fleet.share(replica.rank, replica.size)
    if replica is not None:
        streams = len(own.stream_addresses), len(fleet.stream_addresses)
        pipeline = pipeline.share(replica.size, *(streams if door is None else (1, replica.size)))

    def agent(spec: ActorSpec) -> Agent:
        return make_agent(spec, fleet.observation_space, action_space, fleet.frame_stack)

    def source(learner: Learner[PublishedWeights]) -> PolySource:
        return served_source(learner, own, pipeline, door=door)

    settings = run_settings(flags, env.name, collection)
    settings = dataclasses.replace(settings, of_command=of_command)
    others_serve = collection.processes is None
    seen_keys = names(fleet.observation_space)
    played = Played(env=env, seen_keys=seen_keys, others_serve=others_serve)
    run = LearnerRun(settings, played, opened, replica=replica)
    run.train(agent, PublishedWeights, source)


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


def found(fleet: Fleet) -> str:
    """Returns the sentence that says how many environments and servers there are."""
    hosts, servers = set(fleet.stream_hosts), set(fleet.stream_addresses)
    where = counted(len(hosts), "host") if hosts else counted(len(servers), "server")
    what = f" of {fleet.env.name}" if fleet.env.name else ""
    return f"Found {counted(fleet.num_envs, 'environment')}{what}, on {where}."


def _check_environment(env: str | None, fleet: Fleet) -> None:
    """Raises UsageError when the servers serve another environment than --env."""
    served = fleet.env.name
    if env is not None and served and env != served:
        raise UsageError(f"the servers serve {served}, but --env is {env}: leave out --env")


if __name__ == "__main__":
    end_program(main())
