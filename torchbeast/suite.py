# SPDX-License-Identifier: Apache-2.0
"""Trains an algorithm on every task of a suite with several seeds, and reports its scores.

python -m torchbeast.suite minatar --algo pqn --seeds 10
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from torchbeast import compare
from torchbeast.cli.command_line import parse_known
from torchbeast.core.algos.registry import spelt
from torchbeast.core.base.checks import at_least, did_you_mean, in_any_case
from torchbeast.errors import UsageError, exit_code_of, expanded, refusing_paths
from torchbeast.sweep.__main__ import sweep
from torchbeast.sweep.table import AgentRow

PROGRAM = "suite"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tasks of a suite.

    Args:
        presets: Names of presets by the name of an algorithm: one preset for all environments, or
            a preset for each task.
        envs: The environments, if the presets are not tasks themselves.
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
            raise UsageError(
                f"the suite has no settings for {algo}, only for {', '.join(self.presets)}: use "
                "--preset"
            )
        values = {"env": self.envs, "preset": presets if len(presets) > 1 else ()}
        varied = [f"{name}={','.join(each)}" for name, each in values.items() if each]
        return [*varied, *([f"--preset={presets[0]}"] if len(presets) == 1 else [])]


_MINATAR = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
_ATARI_5 = ("BattleZone", "DoubleDunk", "NameThisGame", "Phoenix", "Qbert")

SUITES = {
    "minatar": Suite(
        presets={
            "impala": ("minatar-breakout",),
            "ppo": ("minatar-breakout-ppo",),
            "pqn": ("minatar-breakout-pqn",),
            "dqn": ("minatar-breakout-dqn",),
        },
        envs=tuple(f"MinAtar/{game}-v1" for game in _MINATAR),
    ),
    "classic": Suite(
        presets={
            "impala": ("cartpole", "pendulum"),
            "ppo": ("cartpole-ppo",),
            "dqn": ("cartpole-dqn",),
            "sac": ("pendulum-sac",),
        }
    ),
    # Scores on these games predict the scores on all 57 (Aitchison et al. 2022).
    "atari-5": Suite(
        presets={"impala": ("atari-paper",)},
        envs=tuple(f"{game}NoFrameskip-v4" for game in _ATARI_5),
    ),
    "mujoco-3": Suite(
        presets={"sac": ("halfcheetah-sac",)}, envs=("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
    ),
}


def suite(name: str) -> Suite:
    """Returns the suite of a name, or of a JSON file with `presets` and `envs`."""
    if (known := in_any_case(name, SUITES)) in SUITES:
        return SUITES[known]
    if not name.endswith(".json"):
        known = ", ".join(SUITES)
        raise UsageError(
            f"no suite {name!r}: use {known}, or a .json file{did_you_mean(name, SUITES)}"
        )
    try:
        with refusing_paths("use a file that can be read"):
            read = json.loads(Path(expanded(name)).read_text(encoding="utf-8"))
        presets = {algo: tuple(each) for algo, each in read["presets"].items()}
        return Suite(presets=presets, envs=tuple(read.get("envs", ())))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f'{name} must contain {{"envs": ["A", "B"], "presets": {{"ppo": ["cartpole-ppo"]}}}}'
        ) from None


@dataclass(frozen=True, kw_only=True)
class SuiteFlags:
    """Trains an algorithm on every task of a suite with several seeds, and reports its scores.

    All other flags go to the sweep that trains the runs (python -m torchbeast.sweep --help), and
    from there to its program. The same command continues an interrupted suite.
    """

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """minatar, classic, atari-5, mujoco-3, or a .json file with the environments, and presets by
    algorithm: {"envs": ["MinAtar/Breakout-v1"], "presets": {"ppo": ["minatar-breakout-ppo"]}}."""
    algo: str
    """The algorithm, such as impala or pqn. Its settings come from the suite, or from --preset."""
    preset: str | None = None
    """Settings for all tasks, in place of the suite's."""
    seeds: int = 10
    """Number of runs of each task."""
    first_seed: int = 1
    """Seed of the first run; the other seeds are consecutive."""
    name: str | None = None
    """The folder in --savedir. Default: the suite and the algorithm, as in minatar-pqn."""

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds)
        at_least(0, first_seed=self.first_seed)
        object.__setattr__(self, "algo", spelt(self.algo))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 if a run failed, 2 on wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    """Trains the runs, and reports their scores; returns the exit code."""
    flags, words = parse_known(SuiteFlags, PROGRAM, argv)
    seeds = ",".join(str(flags.first_seed + number) for number in range(flags.seeds))
    tasks = suite(flags.suite).words(flags.algo, flags.preset)
    algo = [] if flags.preset is None else [f"--algo={flags.algo}"]
    name = flags.name or f"{Path(flags.suite).stem}-{flags.algo}"
    command = ["--set", f"seed={seeds}", *tasks, *algo, "--name", name, *words]
    return sweep(command, PROGRAM, _report)[1]


def _report(rows: Sequence[AgentRow], folder: Path) -> None:
    if all(math.isnan(row.progress.mean_return) for row in rows):
        return
    output = [folder / "suite.json", *([folder / "suite.png"] if find_spec("matplotlib") else [])]
    compare.run(compare.CompareFlags(runs=(str(folder),), output=tuple(output)))
    print(f"Results: {', '.join(map(str, output))}")


if __name__ == "__main__":
    sys.exit(main())
