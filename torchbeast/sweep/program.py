# SPDX-License-Identifier: Apache-2.0
"""The program: checks every agent, runs them all, and reports."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torchbeast.core.wording import typed
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, UsageError, refusing_paths
from torchbeast.learning.session import session
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.servers.addresses import runtime_folder
from torchbeast.sources.sharing.service import Served, serving
from torchbeast.sweep.agents import agents_of, compared
from torchbeast.sweep.config import SweepConfig, SweepFlags
from torchbeast.sweep.on_ray import on_ray
from torchbeast.sweep.runner import Asha, Runner, runner_here
from torchbeast.sweep.table import Board, Row, report


def run(flags: SweepFlags, words: Sequence[str]) -> int:
    """Runs a sweep; returns the exit code.

    words: the flags of the agents' program.
    """
    config = flags.sweep
    folder = config.folder()
    with refusing_paths("give another --savedir or --name"):
        what = compared(config, [*words, *_address_of_agents(config)], folder)
    if config.on == "ray" and what.program == "raybeast":
        raise UsageError(
            "agents of raybeast use Ray themselves, each with its own actors: leave out --on ray, "
            "or give --program monobeast"
        )
    agents = agents_of(what.program, what.set, what.words, folder, what.shared_replay)
    rows = [Row(agent) for agent in agents]
    with session(folder, dataclasses.asdict(what)) as opened:
        _train(rows, config, what.shared_replay, opened.supervisor)
        _report(rows, config)
    return EXIT_FAILURE if any(row.state == "failed" for row in rows) else EXIT_DONE


def _address_of_agents(config: SweepConfig) -> list[str]:
    """Returns --address for agents that use Ray themselves."""
    return [f"--address={config.address}"] if config.address and config.on == "local" else []


def _train(
    rows: Sequence[Row], config: SweepConfig, shared_replay: bool, supervisor: Supervisor
) -> None:
    """Runs the agents that are not complete, until they or the sweep have ended."""
    if all(row.state == "done" for row in rows):
        print(f"All {len(rows)} agents are complete; a larger --total_steps continues them.")
        return
    with ExitStack() as ending:
        runner, replay = _runner(ending, rows, config, shared_replay)
        folder = rows[0].agent.folder.parent
        title = f"{folder.name}: agents of {rows[0].agent.program} ({len(rows)}), {runner}"
        print(f"{title}. Their files are in {folder}", flush=True)
        board = ending.enter_context(Board(title, rows))

        def show() -> None:
            board.show()
            if replay is not None and replay.failure is not None:
                supervisor.fail("the shared replay", replay.failure)

        runner.run(rows, supervisor, show)


def _runner(
    ending: ExitStack, rows: Sequence[Row], config: SweepConfig, shared_replay: bool
) -> tuple[Runner, Served | None]:
    """Returns what runs the agents, and the replay that they share, if they do."""
    waiting = [row.agent for row in rows if row.state == "waiting"]
    steps = min(agent.total_steps for agent in waiting)
    asha = Asha(steps) if config.scheduler == "asha" else None
    if config.on == "ray":
        return ending.enter_context(on_ray(config, waiting, shared_replay, asha))
    if not shared_replay:
        return runner_here(len(waiting), config.parallel, asha=asha), None
    parent = runtime_folder() or Path(tempfile.gettempdir())  # private, with a short name
    replay = ending.enter_context(serving(parent / f"torchbeast-{secrets.token_hex(6)}"))
    more = [f"--replay_service={replay.address}"]
    return runner_here(len(waiting), config.parallel or len(waiting), more, asha), replay


def _report(rows: Sequence[Row], config: SweepConfig) -> None:
    """Prints the ranking and the command that continues the sweep."""
    folder = rows[0].agent.folder.parent
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
