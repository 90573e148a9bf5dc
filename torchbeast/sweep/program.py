# SPDX-License-Identifier: Apache-2.0
"""The program: checks every agent, runs them all, and reports."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torchbeast.errors import EXIT_DONE, EXIT_FAILURE
from torchbeast.learning.session import raise_failure
from torchbeast.processes.cores import available_cores
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.run_folder import RunFolder
from torchbeast.sources.servers.addresses import runtime_folder
from torchbeast.sources.shared_replay import Served, serving
from torchbeast.sweep.flags import SweepFlags
from torchbeast.sweep.local import LocalRunner, share_of
from torchbeast.sweep.ranking import report
from torchbeast.sweep.record import Compared, compared
from torchbeast.sweep.settings import Agent, agents_of
from torchbeast.sweep.table import Board, Row


def run(flags: SweepFlags, words: Sequence[str]) -> int:
    """Runs a sweep; returns the exit code.

    words: the flags of the agents' program.
    """
    folder = flags.sweep.folder()
    what = compared(flags.sweep, words, folder)
    agents = agents_of(what.program, what.set, what.words, folder, what.shared_replay)
    with _opened(folder, what) as supervisor:
        rows = [Row(agent) for agent in agents]
        _train(rows, flags.sweep.parallel, what.shared_replay, supervisor)
        _report(rows, folder, supervisor)
    raise_failure(supervisor.failure)
    return EXIT_FAILURE if any(row.state == "failed" for row in rows) else EXIT_DONE


@contextmanager
def _opened(folder: Path, what: Compared) -> Iterator[Supervisor]:
    """Opens the sweep's folder; the supervisor handles signals until the block has ended."""
    supervisor, successful = Supervisor(), False
    with supervisor.signals():
        opened = RunFolder(folder, dataclasses.asdict(what))
        try:
            yield supervisor
            successful = True
        finally:
            opened.finish(successful)


def _train(
    rows: Sequence[Row], parallel: int | None, shared_replay: bool, supervisor: Supervisor
) -> None:
    """Runs the agents that are not complete, until they or the sweep have ended."""
    folder, cores = rows[0].agent.folder.parent, available_cores()
    waiting = sum(row.state == "waiting" for row in rows)
    if not waiting:
        print(f"All {len(rows)} agents are complete; a larger --total_steps continues them.")
        return
    share = share_of(waiting, parallel or (waiting if shared_replay else None), cores)
    title = f"{folder.name}: {_agents(len(rows), rows[0].agent)}, {share}"
    print(f"{title}. Their files are in {folder}", flush=True)
    if share.agents > cores:
        print(f"That is more agents than this machine has cores ({cores}): each learns slower.")
    with ExitStack() as ending:
        replay = ending.enter_context(_shared_replay()) if shared_replay else None
        more = [] if replay is None else [f"--replay_service={replay.address}"]
        board = ending.enter_context(Board(title, rows))

        def show() -> None:
            board.show()
            if replay is not None and replay.failure is not None:
                supervisor.fail("the shared replay", replay.failure)

        LocalRunner(share, more).run(rows, supervisor, show)


@contextmanager
def _shared_replay() -> Iterator[Served]:
    """Starts a replay whose socket is in a private folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="torchbeast-", dir=runtime_folder()) as folder:
        with serving(Path(folder)) as served:
            yield served


def _agents(count: int, first: Agent) -> str:
    return f"{count} agent{'s' if count > 1 else ''} of {first.program}"


def _report(rows: Sequence[Row], folder: Path, supervisor: Supervisor) -> None:
    """Prints the ranking and the command that continues the sweep."""
    if supervisor.interrupted:
        print(f"Stopped by {supervisor.reason}.", flush=True)
    report(rows, folder)
    if any(row.state != "done" for row in rows):
        where = ["--savedir", str(folder.parent), "--name", folder.name]
        python = Path(sys.executable).name
        print(f"Continue it:\n  {python} -m torchbeast.sweep {shlex.join(where)}", flush=True)
