# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's learner, for environment servers that are already running.

python -m torchbeast.polybeast_env --num_servers 10          in one terminal
python -m torchbeast.polybeast_learner                       in another

Servers on other machines: polybeast_learner --env_servers HOST:PORT --tls_ca FILE \\
    --token_file FILE
Hosts that dial in: polybeast_learner --listen HOST:PORT --tls_cert FILE --tls_key FILE \\
    --token_file FILE
Data-parallel learners: torchrun --nproc_per_node=2 -m torchbeast.polybeast_learner
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchbeast.cli.command_line import flatten, parse, run_with
from torchbeast.cli.flags import PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.core.algos.config import with_values
from torchbeast.core.base.checks import counted
from torchbeast.core.envs.spaces import Discrete
from torchbeast.envs.spec import EnvConfig, EnvSpec
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of
from torchbeast.fleets.supervisor import Supervisor, end_program
from torchbeast.fleets.system import launched
from torchbeast.fleets.waiting import say, warn
from torchbeast.reporting.run_folder import session
from torchbeast.run.config import UNKNOWN
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.plan import Plan
from torchbeast.run.training import DONE, ENOUGH
from torchbeast.servers.addresses import hosts, server_addresses, socket_path, user_basename
from torchbeast.servers.config import ServedEnvConfig
from torchbeast.servers.security import credentials, flags_of_others, silence_grpc

if TYPE_CHECKING:  # compiled; `main` reports its absence
    from torchbeast.run.replicas import Replica
    from torchbeast.servers.discovery import ServerFleet
    from torchbeast.servers.joining import JoinServer

PROGRAM = "polybeast_learner"
_SERVERS = "the servers"  # key of the message from rank 0 to the others
_ENVS = "environments of rank "  # keys of the messages of all
_PAUSE_S = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if done or stopped, 1 if it failed, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: Sequence[str]) -> int:
    """Runs as the only learner, or as one of the learners that torchrun has started."""
    launch, flags_of = launched(), functools.partial(parse, PolyBeastLearnerFlags, PROGRAM)
    if launch is None:
        return run_with(flags_of(argv), run)
    from torchbeast.run.replicas import replica

    with replica(launch) as among, among.flags(argv, flags_of) as flags:
        return run_with(flags, functools.partial(run, replica=among))


def run(flags: PolyBeastLearnerFlags, replica: Replica | None = None) -> int:
    """Trains or evaluates, depending on --mode.

    replica: this process among several learners; None: it is the only learner.
    """
    if replica is not None:
        _check_shared(flags, replica)
    if flags.command.mode != "train":
        return flags.test_run(flags.environment.asked)
    import torchbeast.servers.discovery  # noqa: F401 - raises immediately if not built

    silence_grpc()
    if (protection := flags.protection) is not None:
        credentials(protection)  # refuses files that cannot be used
    is_kept = replica is None or replica.leads
    with (
        session(flags.run.folder, flatten(flags), is_kept) as opened,
        _join_server(flags, opened.supervisor, replica) as join_server,
    ):
        fleet = _found(flags, join_server, replica, opened.supervisor)
        plan = plan_of(flags, _described(fleet, flags.environment), replica, join_server)
        LearnerRun(plan, opened, replica=replica).train()
    return EXIT_DONE


def _check_shared(flags: PolyBeastLearnerFlags, replica: Replica) -> None:
    """Raises UsageError for flags with which several learners cannot run."""
    if flags.command.mode != "train":
        raise UsageError(
            f"--mode {flags.command.mode} runs in one process, but torchrun started "
            f"{replica.size}: start it without torchrun"
        )
    served = flags.fleet
    if served.env_servers is None and served.listen is None and not replica.on_one_machine:
        raise UsageError(
            "learners on several machines cannot share servers that only one of them can reach: "
            "use --env_servers or --listen, or start all learners on one machine"
        )
    replica.check_can_share(flags.rollouts, flags.replay, flags.hardware)
    replica.check_same(flags)


def _found(
    flags: PolyBeastLearnerFlags,
    join_server: JoinServer | None,
    replica: Replica | None,
    supervisor: Supervisor,
) -> ServerFleet:
    """Returns the fleet of all learners: rank 0 queries the servers, and tells the other ranks.

    If hosts dial in, each learner has its own hosts, which must serve the same environment as the
    hosts of rank 0.
    """
    goes_on = supervisor.check_goes_on
    if replica is None or replica.leads:
        fleet = _find(flags, join_server, replica, goes_on)
        if replica is not None:
            replica.ranks.tell(_SERVERS, json.dumps(fleet.descriptions))
        return fleet
    own = None if join_server is None else _find(flags, join_server, replica, goes_on)
    from torchbeast.core.update.torch_ranks import TIMEOUT_S
    from torchbeast.servers.discovery import check_same, fleet_of

    limit = flags.fleet.connect_timeout + TIMEOUT_S  # rank 0 waits for its hosts first
    theirs = json.loads(replica.ranks.told(_SERVERS, lambda: supervisor.wait(_PAUSE_S), limit))
    goes_on()
    if own is not None:
        name, said = next(iter(own.descriptions.items()))
        first, wanted = next(iter(theirs.items()))
        check_same(first, wanted, name, json.loads(json.dumps(said)))  # tuples become lists
        return own
    ours = None if (protection := flags.protection) is None else credentials(protection)
    return dataclasses.replace(fleet_of(theirs), credentials=ours)


def _find(
    flags: PolyBeastLearnerFlags,
    join_server: JoinServer | None,
    replica: Replica | None,
    check_goes_on: Callable[[], None],
) -> ServerFleet:
    """Finds the servers: on this machine, on other machines, or of hosts that dial in."""
    from torchbeast.servers.discovery import Asking, find_servers

    served = flags.fleet
    wanted, timeout = served.num_envs, served.connect_timeout
    if join_server is not None:
        size = 1 if replica is None else replica.size
        least = flags.pipeline.share(size, 1, size).min_streams or 1
        if replica is None:
            return join_server.find(wanted, timeout, check_goes_on, min_streams=least)
        of_all = functools.partial(_of_all, replica)
        return join_server.find(wanted, timeout, check_goes_on, of_all, least)
    if served.env_servers is None:
        named = [served.pipes_basename or user_basename()]
    else:
        named = hosts(served.env_servers)
    return find_servers(named, wanted, Asking(timeout, flags.protection, check_goes_on))


def _of_all(replica: Replica, own: int) -> int:
    """Tells the other learners how many environments this one has; returns the sum of the numbers
    that all told last, or 0 until each has one: learners that train wait for another one only
    briefly.
    """
    replica.ranks.tell(f"{_ENVS}{replica.rank}", str(own))
    told = [
        replica.ranks.told(f"{_ENVS}{rank}", lambda: True, before="0")
        for rank in range(replica.size)
    ]
    return sum(map(int, told)) if all(told) else 0


def _described(fleet: ServerFleet, asked: ServedEnvConfig) -> ServerFleet:
    """Returns the fleet, and adds what servers of TorchBeast 2019 do not describe.

    Raises UsageError if the servers serve another environment than --env, or if --num_actions is
    missing.
    """
    served, action_space = fleet.env, fleet.action_space
    if asked.env is not None and served.name and asked.env != served.name:
        raise UsageError(
            f"the servers serve {served.name}, but --env (or the preset's) is {asked.env}: use "
            f"--env {served.name}, or start servers of {asked.env}"
        )
    if action_space is None and asked.num_actions is None:
        raise UsageError(
            "these are servers of the original TorchBeast, which do not send their action space: "
            "set num_actions"
        )
    return dataclasses.replace(
        fleet,
        env=served if served.name else dataclasses.replace(served, name=UNKNOWN),
        action_space=action_space or Discrete(asked.num_actions or 0),
    )


@contextmanager
def _join_server(
    flags: PolyBeastLearnerFlags, supervisor: Supervisor, replica: Replica | None
) -> Iterator[JoinServer | None]:
    """Lets hosts dial in for the duration of the block; yields None without --listen.

    Each of several learners on a machine has its own port: the port of --listen plus the learner's
    number on the machine.
    """
    from torchbeast.servers.joining import JoinServer

    if flags.fleet.listen is None:
        yield None
        return
    number, count = (0, 1) if replica is None else (replica.local_rank, replica.local_size)
    addresses = server_addresses(flags.fleet.listen, count)
    opened = JoinServer(addresses[number], flags.security)
    try:
        others = flags_of_others("--learner", addresses, flags.security)
        if replica is not None and not replica.on_one_machine:
            others += "; add the other machines' learners to --learner"
        say(f"Waiting for hosts at {addresses[0]}: python -m torchbeast.polybeast_env {others}")
        yield opened
    finally:
        is_complete = supervisor.reason in (DONE, ENOUGH) and supervisor.failure is None
        opened.close(run_has_ended=is_complete)


def plan_of(
    flags: PolyBeastFlags | PolyBeastLearnerFlags,
    fleet: ServerFleet,
    replica: Replica | None = None,
    join_server: JoinServer | None = None,
) -> Plan:
    """Returns the plan of a run with the environments of the fleet.

    replica: this process among several learners, which divide the fleet's streams among themselves;
    None: it is the only learner. join_server: where hosts dial in. Each learner then has its own
    fleet, which is not divided.
    """
    from torchbeast.servers.source import ServedCollection  # compiled

    say(_sentence(fleet))
    env = _with_own_options(fleet.env, flags.environment)
    rank, size = (0, 1) if replica is None else (replica.rank, replica.size)
    if join_server is None:
        streams = len(fleet.stream_addresses)
        flags.pipeline.check_enough(streams)  # refused before anything else is printed
        own = fleet.share(rank, size)
        pipeline = flags.pipeline.share(size, len(own.stream_addresses), streams)
    else:
        own, pipeline = fleet, flags.pipeline.share(size, 1, size)
    started = flags.fleet.servers() if isinstance(flags, PolyBeastFlags) else None
    collection = ServedCollection(
        num_envs=fleet.num_envs,
        processes=started,
        fixed_lag=None,
        is_local=join_server is None and all(map(socket_path, fleet.stream_addresses)),
        fleet=own,
        pipeline=pipeline,
        join_server=join_server,
    )
    wanted = None if join_server is None else flags.fleet.num_envs
    flags = with_values(flags, {"num_envs": fleet.num_envs})  # the run records the actual number
    spaces: Any = fleet.observation_space, fleet.action_space, fleet.frame_stack
    program = PROGRAM if started is None else "polybeast"
    plan = flags.plan(program, env, spaces, collection)
    return dataclasses.replace(
        plan,
        others_serve=started is None,
        asked=flags.environment.asked,
        repeated=[*plan.repeated, *([] if wanted is None else ["--num_envs", str(wanted)])],
    )


def _with_own_options(env: EnvSpec, own: EnvConfig | ServedEnvConfig) -> EnvSpec:
    """Returns the environment with what only this program's flags decide: the folder of self-play,
    the scale of the tasks' returns, and the tasks' shares if it starts the servers.

    Raises UsageError if the servers do not play against the versions that are written there, or if
    task_returns do not fit their tasks.
    """
    pool, shares = own.selfplay, getattr(own, "task_shares", ())
    if pool and "elo" not in env.options.info_keywords:
        raise UsageError("the servers do not have selfplay: add --selfplay to polybeast_env too")
    if "elo" in env.options.info_keywords and not pool:
        warn(
            "the servers rate self-play, but no versions will be written, so opponents move at "
            "random: add --selfplay to polybeast_learner too"
        )
    env = env.with_options(selfplay=pool, task_shares=shares, task_returns=own.task_returns)
    _ = env.tasks  # checks the task_returns
    return env


def _sentence(fleet: ServerFleet) -> str:
    """Returns a message with the number of environments and servers."""
    hosts, servers = set(fleet.stream_hosts), set(fleet.stream_addresses)
    where = counted(len(hosts), "host") if hosts else counted(len(servers), "server")
    what = f"{fleet.env.name} environment" if fleet.env.name != UNKNOWN else "environment"
    return f"Found {counted(fleet.num_envs, what)} on {where}."


if __name__ == "__main__":
    end_program(main())
