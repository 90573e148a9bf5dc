# SPDX-License-Identifier: Apache-2.0
"""Population based training (Jaderberg et al. 2017, arXiv:1711.09846).

The steps are divided into rounds. After each round, every member in the worst quarter continues
from the checkpoint of a member in the best quarter, with that member's settings, slightly changed:

    round     1     2     3     4
    member 0  ------------+------
    member 1  ------+-----|------
    member 2  ------|-----+------      continues from member 0 after round 2
    member 3  ------+------------      continues from member 1 after round 1

A member keeps its seed in all rounds, so its random numbers differ from those of its parent.

pbt.csv in the sweep's folder has a line for each member and round. It suffices to continue.
"""

from __future__ import annotations

import csv
import math
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from torchbeast import plot
from torchbeast.cli.command_line import flag_names, parse
from torchbeast.core.base.checks import names_with
from torchbeast.errors import UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import say
from torchbeast.reporting.log_files import csv_line
from torchbeast.reporting.run_folder import CHECKPOINT, write_atomically
from torchbeast.seeds import seed_of
from torchbeast.sweep.agents import FLAGS, AgentRun, as_words, flag_of
from torchbeast.sweep.search import SEED, Values, is_logarithmic, moved, position, value_at
from torchbeast.sweep.table import AgentRow, has_ended_well, print_errors

CSV, PNG = "pbt.csv", "pbt.png"
_QUARTER = 0.25
_ANEW = 0.25  # share of the changed settings that are drawn again; the others move a little
# Settings that belong to a checkpoint, or that a round cannot change; also of the agent, the task.
_FIXED = {SEED, "preset", "total_steps", "optimiser", "replay_size"}
_FIXED |= {"popart", "normalise_returns", "reward_clipping"}  # which decides the one before


@dataclass(eq=False)
class Turn:
    """A member in a round."""

    round: int  # from 1 on
    member: int
    parent: int  # the member from whose checkpoint it started
    settings: Mapping[str, str]
    seed: int  # the member's, in all rounds
    step: int = 0  # at the end of the round; 0 until then
    mean_return: float = math.nan


# Columns of pbt.csv, before the settings, and their types.
_COLUMNS = {name: kind for name, kind in get_type_hints(Turn).items() if name != "settings"}


class Population:
    """The members of a sweep with --scheduler pbt. Used by the main thread."""

    def __init__(self, agents: Sequence[AgentRun], values: Values, rounds: int) -> None:
        """Reads pbt.csv, if an earlier part of the sweep wrote it.

        Args:
            agents: One for each member, with its first settings.
            values: The values or the range of each setting.
            rounds: Number of rounds.

        Raises:
            UsageError: If there are too few members or steps, or settings that cannot change.
        """
        if len(agents) < 4:
            raise UsageError(
                f"pbt needs at least 4 agents, but --set has {len(agents)}: use ranges, such as "
                "learning_rate=0.0001:0.01, and --trials 8"
            )
        flags = FLAGS[agents[0].program]
        fixed_names = set(_FIXED)
        for trait in ("agent", "task", "atari"):
            fixed_names |= names_with(trait, flags)
        known = flag_names(flags)
        if fixed := [key for key in values if flag_of(f"--{key}", known) in fixed_names]:
            raise UsageError(
                f"pbt changes the settings in --set while it trains, and {fixed[0]} cannot change: "
                f"set --{fixed[0]} once"
            )
        parsed = parse(flags, agents[0].program, agents[0].words)
        if parsed.checkpoints.disable_checkpoint:
            raise UsageError("pbt copies checkpoints: remove --disable_checkpoint")
        if (steps := agents[0].total_steps) < rounds:
            raise UsageError(
                f"--rounds {rounds} is more than --total_steps {steps}: use fewer rounds, or more "
                "steps"
            )
        start, is_kept = parsed.replay.learn_start, parsed.replay.checkpoint_replay
        if parsed.learns_from_transitions and not is_kept and start >= steps // rounds:
            raise UsageError(
                f"training never begins after --learn_start {start} in rounds of {steps // rounds} "
                "steps: use a smaller --learn_start, fewer --rounds, more steps, or "
                "--checkpoint_replay"
            )
        self._values, self._rounds = values, rounds
        self._folder = agents[0].folder.parent
        self._agents = [_as_member(agent, number) for number, agent in enumerate(agents)]
        root = secrets.randbits(31) if agents[0].seed is None else agents[0].seed
        self._turns = _read(self._folder / CSV, values) or [
            Turn(1, number, number, agent.settings, seed_of(root, "member", number))
            for number, agent in enumerate(agents)
        ]

    @property
    def round(self) -> int:
        """The number of the round, from 1 on."""
        return self._turns[-1].round

    def rows(self) -> list[AgentRow]:
        """Returns the members, with their settings in this round."""
        rows = []
        for agent, turn in zip(self._agents, self._now, strict=True):
            end = agent.total_steps * turn.round // self._rounds
            pause = [f"--pause_at={end}"] if turn.round < self._rounds else []
            # A changed rate is relative to the parent's, which has decayed: keep its schedule.
            always = [f"--seed={turn.seed}", "--no_restart_schedules"]
            words = [*agent.words, *always, *as_words(turn.settings), *pause]
            agent = replace(agent, settings=turn.settings, words=words)
            row = AgentRow(agent, self._copied_at(turn.member))
            is_past = bool(pause) and row.progress.step >= end and has_ended_well(agent.folder)
            if row.state == "waiting" and is_past:
                row.state = "stopped"  # before the sweep was interrupted
            rows.append(row)
        return rows

    def run(
        self, rows: list[AgentRow], run_round: Callable[[], None], supervisor: Supervisor
    ) -> None:
        """Runs the rounds that are left. Keeps in `rows` the members of the current round."""
        self._write()
        while True:
            run_round()
            self.note(rows)
            has_failed = all(row.state == "failed" for row in rows)
            if supervisor.ended or has_failed or self.round == self._rounds:
                return
            print_errors(rows)  # which the next round replaces
            self._turns += self._next_round()
            self._write()  # at once: it has replaced checkpoints
            rows[:] = self.rows()

    def note(self, rows: Sequence[AgentRow]) -> None:
        """Writes how far the members came in this round."""
        for turn, row in zip(self._now, rows, strict=True):
            turn.step = row.progress.step
            turn.mean_return = math.nan if row.state == "failed" else row.progress.mean_return
        self._write()

    def _copied_at(self, member: int) -> int:
        """Returns the step at which a member last continued from another one; -1: it never did.

        Earlier rows of its log belong to weights that it no longer has.
        """
        steps = {(turn.round + 1, turn.member): turn.step for turn in self._turns}
        copies = [t for t in self._turns if t.member == member and t.parent != member]
        return steps[copies[-1].round, copies[-1].parent] if copies else -1

    @property
    def _now(self) -> list[Turn]:
        return self._turns[-len(self._agents) :]

    def _next_round(self) -> list[Turn]:
        """Lets the worst members continue from the best ones; returns the turns of all members."""
        rng = random.Random(f"{self._now[0].seed} {self.round}")
        order = sorted(self._now, key=_score)
        share = max(1, int(len(order) * _QUARTER))
        turns = []
        for turn in self._now:
            parent, settings = turn, turn.settings
            better = rng.choice(order[-share:])
            if turn in order[:share] and _score(turn) < _score(better):
                parent, settings = better, self._explored(better.settings, rng)
                self._exploit(turn, parent, settings)
            turns.append(Turn(turn.round + 1, turn.member, parent.member, settings, turn.seed))
        return turns

    def _explored(self, settings: Mapping[str, str], rng: random.Random) -> dict[str, str]:
        return {
            key: value_at(self._values[key], rng.random())
            if rng.random() < _ANEW
            else moved(self._values[key], value, rng.choice((-1, 1)))
            for key, value in settings.items()
        }

    def _exploit(self, turn: Turn, parent: Turn, settings: Mapping[str, str]) -> None:
        """Gives a member the weights, the state of the optimiser and the counters of another."""
        source, target = (self._agents[each.member].folder / CHECKPOINT for each in (parent, turn))
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, source.read_bytes())
        changes = ", ".join(
            f"{key} {turn.settings[key]} -> {value} (of {parent.settings[key]})"
            for key, value in settings.items()
        )
        say(
            f"After round {turn.round}, {self._agents[turn.member].name} (mean return "
            f"{turn.mean_return:.4g}) continues from {self._agents[parent.member].name} "
            f"({parent.mean_return:.4g}) with changed settings: {changes}"
        )

    def _write(self) -> None:
        lines = [csv_line([*_COLUMNS, *self._values])]
        for turn in self._turns:
            settings = [turn.settings[key] for key in self._values]
            lines.append(csv_line([*(getattr(turn, name) for name in _COLUMNS), *settings]))
        write_atomically(self._folder / CSV, "".join(lines).encode())

    def report(self) -> None:
        """Draws the history of the population, if matplotlib is installed."""
        turns = [turn for turn in self._turns if turn.step]
        if not turns:
            return
        output = self._folder / PNG
        try:
            _draw(turns, self._values, output)
        except UsageError as error:
            print(f"Cannot plot the population: {error}.")
            return
        print(f"Population history: {self._folder / CSV} and {output}")


def _score(turn: Turn) -> float:
    return -math.inf if math.isnan(turn.mean_return) else turn.mean_return


def _as_member(agent: AgentRun, number: int) -> AgentRun:
    """Returns an agent with a name that does not contain its settings, which will change."""
    name = f"member-{number:02}"
    words = [*agent.words, "--xpid", name]
    return replace(agent, name=name, words=words, folder=agent.folder.with_name(name))


def _read(path: Path, names: Collection[str]) -> list[Turn]:
    """Returns what an earlier part of the sweep wrote of these settings; empty for a new sweep."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        Turn(
            **{name: kind(row[name]) for name, kind in _COLUMNS.items()},
            settings={name: row[name] for name in names},
        )
        for row in rows
    ]


def _ancestors(turns: Sequence[Turn], by_round: Mapping[tuple[int, int], Turn]) -> list[Turn]:
    """Returns the best member of the last round, and its ancestors."""
    last = [turn for turn in turns if turn.round == turns[-1].round]
    line = [max(last, key=_score)]
    while parent := by_round.get((line[-1].round - 1, line[-1].parent)):
        line.append(parent)
    return line


def _draw(turns: Sequence[Turn], values: Values, output: Path) -> None:
    """Draws returns and settings of all members by steps, and highlights the best one's past."""
    by_round = {(turn.round, turn.member): turn for turn in turns}
    best = _ancestors(turns, by_round)
    with plot.figure_for([output], (8, 2.4 * (1 + len(values)))) as figure:
        panels = figure.subplots(1 + len(values), sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, ["mean return", *values], strict=True):
            for turn in turns:
                parent = by_round.get((turn.round - 1, turn.parent), turn)
                style = "-" if parent.member == turn.member else ":"
                line = _line([parent, turn], name, values)
                axes.plot(*line, style, color="#999999", linewidth=0.8)
            axes.plot(*_line(best, name, values), ".-", color=plot.COLOURS[0])
            scale = "log" if is_logarithmic(values.get(name, [""])) else "linear"
            axes.set(ylabel=name, yscale=scale)
            axes.grid(alpha=0.3)
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter(plot.thousands())
        figure.suptitle(
            "Blue: best member and its ancestors. Dotted: continued from another member."
        )


def _line(turns: Sequence[Turn], name: str, values: Values) -> tuple[list[int], list[float]]:
    """Returns the steps of turns, and their values of a setting, or else their mean returns."""
    heights = [
        position(values[name], turn.settings[name]) if name in values else turn.mean_return
        for turn in turns
    ]
    return [turn.step for turn in turns], heights
