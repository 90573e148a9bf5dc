# SPDX-License-Identifier: Apache-2.0
"""Trains several agents that differ in some settings, and compares them.

python -m torchbeast.sweep --set learning_rate=0.0003,0.0006 entropy_cost=0.003,0.01 --env Catch
"""

from __future__ import annotations

import functools
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torchbeast.cli.command_line import parse_known
from torchbeast.collect.shared_replay import Served, serving
from torchbeast.core.base.checks import command, counted
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, UsageError, exit_code_of, refusing_paths
from torchbeast.reporting.run_folder import Session, session
from torchbeast.servers.addresses import runtime_folder
from torchbeast.sweep.agents import SweepPlan, agents_of, sweep_plan
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.on_ray import on_ray
from torchbeast.sweep.pbt import Population
from torchbeast.sweep.runner import Asha, Runner, runner_here
from torchbeast.sweep.table import AgentRow, Board, print_errors, report

PROGRAM = "sweep"


class Swept(NamedTuple):
    """A sweep whose command has ended.

    Attributes:
        rows: Its agents.
        folder: Its folder.
        exit_code: Of the program.
        is_interrupted: Whether a signal ended it.
    """

    rows: Sequence[AgentRow]
    folder: Path
    exit_code: int
    is_interrupted: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 if an agent failed, 2 on wrong usage."""
    return exit_code_of(PROGRAM, lambda: sweep(argv).exit_code)


def sweep(
    argv: Sequence[str] | None,
    program: str = PROGRAM,
    report: Callable[[Sequence[AgentRow], Path], None] = report,
) -> Swept:
    """Checks every agent and trains them all.

    program: the name of the program that the user called. report: called at the end with the agents
    and the sweep's folder.
    """
    config, words = parse_known(SweepConfig, PROGRAM, argv)
    folder = config.folder()
    if config.address and config.on == "local":  # for agents of raybeast
        words.append(f"--address={config.address}")
    with refusing_paths("use another --savedir or --name"):
        plan = sweep_plan(config, words, folder)
    config = plan.config
    if config.on == "ray" and plan.program == "raybeast":
        raise UsageError(
            "raybeast agents use Ray themselves, each with its own actors: remove --on ray, or use "
            "--program monobeast"
        )
    agents = agents_of(plan, folder)
    population = Population(agents, plan.values, config.rounds) if config.rounds else None
    with session(folder, plan.record()) as opened:
        rows = [AgentRow(agent) for agent in agents] if population is None else population.rows()
        _train(rows, plan, opened, population)
        print_errors(rows)
        report(rows, folder)
        if population is not None:
            population.report()
        _say_how_to_continue(rows, config, program)
    code = EXIT_FAILURE if any(row.state == "failed" for row in rows) else EXIT_DONE
    return Swept(rows, folder, code, opened.supervisor.interrupted)


def _train(
    rows: list[AgentRow], plan: SweepPlan, opened: Session, population: Population | None
) -> None:
    """Runs the unfinished agents, until they have ended or the sweep ends."""
    if all(row.state == "done" for row in rows):
        print(f"All {len(rows)} agents are complete; increase --total_steps to continue.")
        return
    supervisor = opened.supervisor
    opened.folder.begin(plan.record(), sum(row.progress.step for row in rows))
    with ExitStack() as ending:
        runner, replay = _runner(ending, rows, plan.config)
        folder = rows[0].agent.folder.parent
        lengths = {row.agent.total_steps for row in rows}  # a setting, if there are several
        length = f" for {max(lengths):,} steps" if len(lengths) == 1 else ""
        what = f"{counted(len(rows), 'run')} of {rows[0].agent.program}{length}"
        title = f"{folder.name}: {what}, {runner.how}"
        print(f"{title}. Output: {folder}", flush=True)
        board = ending.enter_context(Board(title, rows))

        def show() -> None:
            board.show()
            if replay is not None and replay.failure is not None:
                supervisor.fail("the shared replay", replay.failure)

        run = functools.partial(runner.run, rows, supervisor, show)
        if population is None:
            run()
        else:
            population.run(rows, run, supervisor)


def _runner(
    ending: ExitStack, rows: Sequence[AgentRow], config: SweepConfig
) -> tuple[Runner, Served | None]:
    """Returns the runner of the agents, and the replay that they share, or None."""
    waiting = [row.agent for row in rows if row.state != "done"]
    steps = min(agent.total_steps for agent in waiting)
    asha = Asha(steps) if config.scheduler == "asha" else None
    if config.on == "ray":
        return on_ray(ending, config, waiting, asha)
    if not config.shared_replay:
        # also of those that are complete, because the default num_envs follows from the cores
        return runner_here(len(rows), config.parallel, asha=asha), None
    parent = runtime_folder() or Path(tempfile.gettempdir())  # private, with a short name
    replay = ending.enter_context(serving(parent / f"torchbeast-{secrets.token_hex(6)}"))
    more = [f"--replay_service={replay.address}"]
    return runner_here(len(rows), config.parallel or len(rows), more, asha), replay


def _say_how_to_continue(rows: Sequence[AgentRow], config: SweepConfig, program: str) -> None:
    folder = rows[0].agent.folder.parent
    if any(row.state != "done" for row in rows):
        named = [] if config.name else ["--name", folder.name]
        words = shlex.join([*sys.argv[1:], *named])
        print(f"To continue:\n  {command(program)} {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
