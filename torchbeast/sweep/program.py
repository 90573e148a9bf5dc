# SPDX-License-Identifier: Apache-2.0
"""The program: checks every agent, runs them all, and reports."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from torchbeast.core.wording import typed
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, UsageError, refusing_paths
from torchbeast.learning.session import raise_failure
from torchbeast.processes.supervisor import Supervisor
from torchbeast.processes.system import available_cores, environment_of_share
from torchbeast.reporting.output import lossy_output
from torchbeast.reporting.run_folder import RunFolder
from torchbeast.reporting.waiting import Reminder, warn
from torchbeast.sources.servers.addresses import runtime_folder
from torchbeast.sources.sharing.service import Served, serving
from torchbeast.sweep.agents import Agent, Compared, agents_of, compared
from torchbeast.sweep.config import SweepConfig, SweepFlags
from torchbeast.sweep.on_ray import on_ray
from torchbeast.sweep.runner import Asha, Runner, share_of, starting_here
from torchbeast.sweep.table import Board, Row, report


def run(flags: SweepFlags, words: Sequence[str]) -> int:
    """Runs a sweep; returns the exit code.

    words: the flags of the agents' program.
    """
    config = flags.sweep
    folder = config.folder()
    with refusing_paths("give another --savedir or --name"):
        what = compared(config, [*words, *_address_of_agents(config)], folder)
    _check_on_ray(config, what)
    agents = agents_of(what.program, what.set, what.words, folder, what.shared_replay)
    with _opened(folder, what) as supervisor:
        rows = [Row(agent) for agent in agents]
        _train(rows, config, what.shared_replay, supervisor)
        _report(rows, config, supervisor)
    raise_failure(supervisor.failure)
    return EXIT_FAILURE if any(row.state == "failed" for row in rows) else EXIT_DONE


def _address_of_agents(config: SweepConfig) -> list[str]:
    """Returns --address for agents that use Ray themselves."""
    return [f"--address={config.address}"] if config.address and config.on == "local" else []


def _check_on_ray(config: SweepConfig, what: Compared) -> None:
    """Raises UsageError for sweeps that cannot run on Ray."""
    if config.on == "local":
        return
    if what.program == "raybeast":
        raise UsageError(
            "agents of raybeast use Ray themselves, each with its own actors: leave out --on ray, "
            "or give --program monobeast"
        )


@contextmanager
def _opened(folder: Path, what: Compared) -> Iterator[Supervisor]:
    """Opens the sweep's folder; the supervisor handles signals until the block has ended."""
    supervisor, successful = Supervisor(), False
    with lossy_output(), supervisor.signals():
        opened = RunFolder(folder, dataclasses.asdict(what))
        try:
            yield supervisor
            successful = True
        finally:
            opened.finish(successful)


def _train(
    rows: Sequence[Row], config: SweepConfig, shared_replay: bool, supervisor: Supervisor
) -> None:
    """Runs the agents that are not complete, until they or the sweep have ended."""
    if all(row.state == "done" for row in rows):
        print(f"All {len(rows)} agents are complete; a larger --total_steps continues them.")
        return
    with ExitStack() as ending:
        runner, replay = ending.enter_context(_runner(rows, config, shared_replay))
        folder = rows[0].agent.folder.parent
        title = f"{folder.name}: {_agents(len(rows), rows[0].agent)}, {runner}"
        print(f"{title}. Their files are in {folder}", flush=True)
        board = ending.enter_context(Board(title, rows))

        waiting = Reminder(time.monotonic())

        def show() -> None:
            board.show()
            if not all_wait(rows):
                waiting.restart(time.monotonic())
            elif (seconds := waiting.due(time.monotonic())) is not None:
                why = what_they_wait_for(rows, runner)
                warn(f"agents have waited for {seconds:.0f} s: {why}")
            if replay is not None and replay.failure is not None:
                supervisor.fail("the shared replay", replay.failure)

        runner.run(rows, supervisor, show)


def all_wait(rows: Sequence[Row]) -> bool:
    """Returns whether there are agents that have not begun, while no other agent runs."""
    states = {row.state for row in rows}
    return "waiting" in states and not states & {"running", "stopping"}


def what_they_wait_for(rows: Sequence[Row], runner: Runner) -> str:
    """Says why the agents that wait do not begin."""
    if held := [str(row.agent.folder) for row in rows if row.is_held]:
        return f"another process still runs in {', '.join(held)}"
    return f"there is no room for them, or the first one is still starting ({runner})"


@contextmanager
def _runner(
    rows: Sequence[Row], config: SweepConfig, shared_replay: bool
) -> Iterator[tuple[Runner, Served | None]]:
    """Yields what runs the agents, and the replay that they share, if they do."""
    waiting = [row.agent for row in rows if row.state == "waiting"]
    steps = min(agent.total_steps for agent in waiting)
    asha = Asha(steps) if config.scheduler == "asha" else None
    if config.on == "ray":
        with on_ray(config, waiting, shared_replay, asha) as found:
            yield found
        return
    with _shared_replay() if shared_replay else nullcontext() as replay:
        yield _runner_here(len(waiting), config.parallel, replay, asha), replay


def _runner_here(
    agents: int, parallel: int | None, replay: Served | None, asha: Asha | None
) -> Runner:
    """Divides the cores of this machine among the agents that are not complete."""
    cores = available_cores()
    share = share_of(agents, parallel or (None if replay is None else agents), cores)
    if share.agents > cores:
        print(f"{share} is more than this machine has cores ({cores}): each agent learns slower.")
    more = [] if replay is None else [f"--replay_service={replay.address}"]
    start = starting_here(more, environment_of_share(share.cores))
    return Runner(str(share), share.agents, start, asha)


@contextmanager
def _shared_replay() -> Iterator[Served]:
    """Starts a replay whose socket is in a private folder with a short name."""
    parent = runtime_folder() or Path(tempfile.gettempdir())
    with serving(parent / f"torchbeast-{secrets.token_hex(6)}") as served:
        yield served


def _agents(count: int, first: Agent) -> str:
    return f"{count} agent{'s' if count > 1 else ''} of {first.program}"


def _report(rows: Sequence[Row], config: SweepConfig, supervisor: Supervisor) -> None:
    """Prints the ranking and the command that continues the sweep."""
    folder = rows[0].agent.folder.parent
    if supervisor.interrupted:
        print(f"Stopped by {supervisor.reason}.", flush=True)
    report(rows, folder)
    if any(row.state != "done" for row in rows):
        print(f"Continue it:\n  {_continuing(folder, config)}", flush=True)


def _continuing(folder: Path, config: SweepConfig) -> str:
    named = [*typed("--savedir", folder.parent), *typed("--name", folder.name)]
    python = Path(sys.executable).name
    return f"{python} -m torchbeast.sweep {shlex.join([*named, *_words_of_runner(config)])}"


def _words_of_runner(config: SweepConfig) -> list[str]:
    """Returns the flags that run the agents in the same place and in the same way."""
    default = SweepConfig()
    names = ["scheduler"]
    names += ["on", "address", "agent_cpus", "agent_gpus"] if config.on == "ray" else []
    return [
        f"--{name}={getattr(config, name)}"
        for name in names
        if getattr(config, name) != getattr(default, name)
    ]
