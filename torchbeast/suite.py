# SPDX-License-Identifier: Apache-2.0
"""Trains an algorithm on every task of a suite with several seeds, and reports its scores.

python -m torchbeast.suite minatar --algo pqn --seeds 10
python -m torchbeast.suite zoo --only 'hopper-*'          presets, each with the seeds of the zoo
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from torchbeast import compare, errors
from torchbeast.cli.command_line import parse, parse_known
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.cli.resuming import given
from torchbeast.core.algos.registry import spelt
from torchbeast.core.base.checks import Settings, at_least, counted, did_you_mean, require, setting
from torchbeast.envs.env_process import spaces_of
from torchbeast.reporting.log_files import read_logs
from torchbeast.sweep.__main__ import Swept, sweep
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.table import AgentRow
from torchbeast.zoo import NAMES, PRESETS, with_interval

PROGRAM = "suite"
ZOO = "zoo"
_ALL = ("*",)
_HELD_OUT = 101  # the first seed that was not used for tuning


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tasks of a suite.

    Args:
        presets: Names of presets by the name of an algorithm: one preset for all environments, or
            a preset for each task.
        envs: The environments of an algorithm with one preset. Default: the preset's.
    """

    presets: Mapping[str, tuple[str, ...]]
    envs: tuple[str, ...] = ()

    def words(self, algo: str, preset: str | None) -> list[str]:
        """Returns the words of a sweep's command line that choose tasks and settings.

        preset: in place of the suite's own. Raises UsageError if the suite lacks a preset for the
        algorithm.
        """
        presets = self.presets.get(algo, ()) if preset is None else (preset,)
        if not presets:
            raise errors.UsageError(
                f"the suite has no settings for {algo}, only for {', '.join(self.presets)}: use "
                "--preset"
            )
        if len(presets) > 1:
            return [f"preset={','.join(presets)}"]
        envs = self.envs if preset is None else self.envs or self._envs_for(algo)
        return [*([f"env={','.join(envs)}"] if envs else []), f"--preset={presets[0]}"]

    def _envs_for(self, algo: str) -> tuple[str, ...]:
        """Returns the environments of the algorithm's presets; of all for an unknown algorithm."""
        every = (name for names in self.presets.values() for name in names)
        names = self.presets.get(algo) or every
        return tuple(dict.fromkeys(PRESETS[name].task[0] for name in names if name in PRESETS))


def _of_family(family: str, envs: tuple[str, ...] = ()) -> Suite:
    """Returns the suite of the presets of the zoo that are named after an environment and an
    algorithm, and nothing more.

    envs: the environments to train in; default: the presets' own. An algorithm that lacks a preset
    for one of them trains in all with its first preset.
    """
    named: dict[str, dict[str, str]] = {}  # of an algorithm, by environment
    for name, preset in PRESETS.items():
        if preset.family == family and preset.seeds:
            env, algo = preset.task
            if name.endswith(f"-{algo}") and (not envs or env in envs):
                named.setdefault(algo, {})[env] = name
    presets = {
        algo: tuple(names.values())[: None if len(names) == len(envs or names) else 1]
        for algo, names in named.items()
    }
    return Suite(presets=presets, envs=envs)


_MINATAR = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
_ATARI_5 = ("BattleZone", "DoubleDunk", "NameThisGame", "Phoenix", "Qbert")

SUITES = {
    **{name: _of_family(name) for name in dict.fromkeys(p.family for p in PRESETS.values())},
    "minatar": _of_family("minatar", tuple(f"MinAtar/{game}-v1" for game in _MINATAR)),
    "mujoco-3": _of_family("mujoco", ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")),
    # Scores on these games predict the scores on all 57 (Aitchison et al. 2022).
    "atari-5": Suite(
        presets={"impala": ("atari-impala",)},
        envs=tuple(f"{game}NoFrameskip-v4" for game in _ATARI_5),
    ),
}


def suite(name: str) -> Suite:
    """Returns the suite of a name, or of a JSON file with `presets` and `envs`."""
    if (known := SUITES.get(name.lower())) is not None:
        return known
    if not name.endswith(".json"):
        names = ", ".join(SUITES)
        raise errors.UsageError(
            f"no suite {name!r}: use {ZOO}, {names}, or a .json file{did_you_mean(name, SUITES)}"
        )
    try:
        with errors.refusing_paths("use a file that can be read"):
            read = json.loads(Path(errors.expanded(name)).read_text(encoding="utf-8"))
        envs = read.get("envs", [])
        if any(isinstance(names, str) for names in (envs, *read["presets"].values())):
            raise ValueError("a name in place of a list")
        presets = {spelt(algo): tuple(each) for algo, each in read["presets"].items()}
        return Suite(presets=presets, envs=tuple(envs))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise errors.UsageError(
            f'{name} must contain {{"envs": ["A", "B"], "presets": {{"ppo": ["cartpole-ppo"]}}}}'
        ) from None


@dataclass(frozen=True, kw_only=True)
class SuiteFlags(Settings):
    """Trains an algorithm on every task of a suite with several seeds, and reports its scores.

    All other flags go to the sweep that trains the runs (python -m torchbeast.sweep --help), and
    from there to its program. The same command continues an interrupted suite.
    """

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """zoo, minatar, atari-5, mujoco-3, another family of --preset help, or a .json file with the
    environments, and presets by algorithm: {"envs": ["MinAtar/Breakout-v1"], "presets": {"ppo":
    ["minatar-breakout-ppo"]}}. zoo trains presets with the seeds of their published scores, and
    prints the mean returns of 100 greedy episodes after training."""
    only: tuple[str, ...] = _ALL
    """Presets of the zoo, as patterns in quotes, such as 'hopper-*'. Default: all."""
    algo: str | None = None
    """The algorithm, such as impala or pqn. Its settings come from the suite, or from --preset.
    Default in the zoo: all."""
    preset: str | None = None
    """Settings for all tasks, in place of the suite's."""
    seeds: int | None = setting(None, bounds=(at_least, 1))
    """Number of runs of each task. Default: 10; in the zoo, the number of the preset."""
    first_seed: int | None = setting(None, bounds=(at_least, 0))
    """Seed of the first run; the other seeds are consecutive. Default: 1; in the zoo, 101."""
    name: str | None = None
    """The folder in --savedir. Default: the suite and the algorithm, as in minatar-pqn; or zoo,
    with a folder for each preset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_zoo = self.suite == ZOO
        require(is_zoo or self.only == _ALL, "only is for presets of the zoo: use the suite zoo")
        require(
            not is_zoo or self.preset is None, "the zoo trains presets: use --only, not --preset"
        )
        require(is_zoo or self.algo is not None, f"{self.suite} needs --algo, such as impala")
        object.__setattr__(self, "algo", self.algo and spelt(self.algo))

    def seed_values(self, number: int, first: int) -> str:
        """Returns the seeds for --set, by default this number of them."""
        start = first if self.first_seed is None else self.first_seed
        return "seed=" + ",".join(str(start + run) for run in range(self.seeds or number))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 if a run failed, 2 on wrong usage."""
    return errors.exit_code_of(PROGRAM, lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    """Trains the runs, and reports their scores; returns the exit code."""
    flags, words = parse_known(SuiteFlags, PROGRAM, argv)
    if given(words, "--set") is not None:
        raise errors.UsageError(
            "a suite varies only tasks and seeds: use flags without --set, or the program sweep"
        )
    if flags.algo is None or flags.suite == ZOO:
        return train_zoo(flags, words)
    tasks = suite(flags.suite).words(flags.algo, flags.preset)
    algo = [] if flags.preset is None else [f"--algo={flags.algo}"]
    name = flags.name or f"{Path(flags.suite).stem}-{flags.algo}"
    command = ["--set", flags.seed_values(10, first=1), *tasks, *algo, "--name", name, *words]
    return sweep(command, PROGRAM, _report).exit_code


def _report(rows: Sequence[AgentRow], folder: Path) -> None:
    if all(math.isnan(row.progress.mean_return) for row in rows):
        return
    output = [folder / "suite.json", *([folder / "suite.png"] if find_spec("matplotlib") else [])]
    try:
        compare.run(compare.CompareFlags(runs=(str(folder),), output=tuple(output)))
        print(f"Results: {', '.join(map(str, output))}")
    except errors.UsageError as error:  # for example before all runs have been extended
        print(f"No comparison: {error}.")


def train_zoo(flags: SuiteFlags, words: Sequence[str]) -> int:
    """Trains presets of the zoo, each in a sweep; prints a line about each.

    A preset that cannot be trained does not stop the others, but a signal does.

    Returns:
        The exit code: 1 if a run has failed or a preset was skipped.
    """
    lines, code = {}, errors.EXIT_DONE
    for name in _chosen(flags):
        try:
            swept = _train(name, flags, words)
            lines[name] = _in_words(swept.rows)
            code = max(code, swept.exit_code)
            if swept.is_interrupted:
                break
        except (errors.UsageError, errors.RunError) as error:
            lines[name], code = f"skipped: {errors.in_one_line(str(error))}", errors.EXIT_FAILURE
    print(*(f"{name}: {line}" for name, line in lines.items()), sep="\n")
    return code


def _chosen(flags: SuiteFlags) -> list[str]:
    """Returns the presets to train; raises UsageError without any."""
    patterns = [NAMES.get(pattern.lower(), pattern.lower()) for pattern in flags.only]
    chosen = [
        name
        for name, preset in PRESETS.items()
        if preset.seeds and flags.algo in (None, preset.task[1])
        if any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise errors.UsageError(
            "the zoo has no such preset: see --preset help of a program that trains"
        )
    return chosen


def _train(name: str, flags: SuiteFlags, words: Sequence[str]) -> Swept:
    """Trains a preset, or continues; raises UsageError if its environment cannot be made."""
    preset = PRESETS[name]
    folder = Path(given(words, "--savedir") or SweepConfig.savedir) / (flags.name or ZOO)
    if not (errors.expanded(folder) / name).exists():
        spec = parse(MonoBeastFlags, "monobeast", ["--preset", name]).environment.spec
        spaces_of(spec, lambda: None)
    seeds = flags.seed_values(preset.seeds, _HELD_OUT)
    at_end = [f"--eval_every={preset.flags['total_steps']}", "--eval_episodes=100"]
    own = ["--set", seeds, f"--preset={name}", *at_end, *words]
    return sweep([*own, "--savedir", str(folder), "--name", name], PROGRAM, lambda *_: None)


def _in_words(rows: Sequence[AgentRow]) -> str:
    """Returns the interquartile mean of the final scores of the runs that are complete."""
    done = [row.agent.folder / "evaluations.csv" for row in rows if row.state == "done"]
    played = [[*read_logs(path)] for path in done if path.exists()]
    scores = [evaluations[-1]["mean_episode_return"] for evaluations in played if evaluations]
    of = f"of {counted(len(rows), 'run')}"
    if not scores:
        return f"none {of} is complete"
    score = with_interval(*compare.compared([[np.array(scores)]]).iqm[0])
    some = "" if len(scores) == len(rows) else f", {len(scores)} {of}"
    return f"evaluation return {score}{some}"


if __name__ == "__main__":
    sys.exit(main())
