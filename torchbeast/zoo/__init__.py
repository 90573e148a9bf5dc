# SPDX-License-Identifier: Apache-2.0
"""The zoo: tuned settings for many tasks, the scores that they reach, and trained agents.

presets.ini      the settings, which `--preset NAME` makes the defaults
records.json     their scores over seeds that were held out
agents/NAME.pt   the policy of one of these seeds

atari_scores.csv has what others reached in Atari games.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from configparser import ConfigParser, SectionProxy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError

_FOLDER = Path(__file__).parent
AGENTS = _FOLDER / "agents"
ATARI_SCORES = _FOLDER / "atari_scores.csv"
"""Returns of random play and of a human in 57 games (Espeholt et al. 2018, table C.1)."""
PREFIX = "zoo:"
"""The prefix of an agent's name where a program or function takes a run."""


class Preset(NamedTuple):
    """The settings of one task."""

    family: str
    sentence: str
    words: str
    """Flags as on the command line. A program ignores the flags that it lacks."""
    seeds: int
    """Number of runs in the zoo, with seeds from 101 on; 0 if it is not in the zoo."""
    also: tuple[str, ...]
    """Earlier names."""
    published: str | None
    """The published figure to compare with: source, algorithm and environment."""

    @property
    def flags(self) -> dict[str, Any]:
        """The values of the flags, by their names."""
        words = shlex.split(self.words)
        starts = [index for index, word in enumerate(words) if word.startswith("--")]
        return {
            words[start][2:]: _value(words[start + 1 : end])
            for start, end in pairwise([*starts, len(words)])
        }

    @property
    def task(self) -> tuple[str, str]:
        """The environment and the algorithm."""
        return self.flags["env"], self.flags.get("algo", "impala")


def _value(words: Sequence[str]) -> Any:
    """Returns the value of a flag; words: those between it and the next flag."""
    if len(words) != 1:
        return tuple(_value([word]) for word in words) or True
    if words == ["None"]:
        return None
    try:
        return json.loads(words[0])
    except ValueError:
        return words[0]


def _presets() -> dict[str, Preset]:
    """Reads presets.ini."""
    read = ConfigParser(interpolation=None)
    read.read_string((_FOLDER / "presets.ini").read_text(encoding="utf-8"))
    return {name: _preset(read[name]) for name in read.sections()}


def _preset(section: SectionProxy) -> Preset:
    return Preset(
        family=section["family"],
        sentence=" ".join(section["sentence"].split()),
        words=" ".join(section["flags"].split()),
        seeds=section.getint("seeds", 10),
        also=tuple(section.get("also", "").split()),
        published=section.get("published"),
    )


PRESETS: Mapping[str, Preset] = _presets()
"""All presets by their names, family by family."""

NAMES: Mapping[str, str] = {
    spelling: name for name, preset in PRESETS.items() for spelling in (name, *preset.also)
}
"""The name of each preset, by its name and by its earlier names."""


class ShippedAgent(NamedTuple):
    """The agent of a preset that the package contains: one of the runs of its record.

    Attributes:
        seed: The run's seed.
        score: Mean return of 100 greedy episodes.
        spread: Their standard deviation.
        commit: The version of TorchBeast that trained it.
    """

    seed: int
    score: float
    spread: float
    commit: str


class Record(NamedTuple):
    """The score of a preset over runs that differ in their seed.

    Attributes:
        score: Interquartile mean, over the seeds, of the mean return of 100 greedy episodes.
        interval: Its 95 % interval.
        seeds: Number of runs.
        steps: Environment steps of each run.
        minutes: Median training time on two shared cores.
        agent: The agent that the package contains, if any.
    """

    score: float
    interval: tuple[float, float]
    seeds: int
    steps: int
    minutes: float
    agent: ShippedAgent | None = None


@functools.cache
def records() -> Mapping[str, Record]:
    """Returns the scores that presets have reached, by the name of the preset."""
    path = _FOLDER / "records.json"
    read = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: _record(**entry) for name, entry in read.items()}


def _record(interval: list[float], agent: dict[str, Any] | None = None, **others: Any) -> Record:
    low, high = interval
    shipped = None if agent is None else ShippedAgent(**agent)
    return Record(interval=(low, high), agent=shipped, **others)


def agent_path(name: str) -> Path:
    """Returns the checkpoint of the agent that was trained with a preset.

    Raises UsageError if the package has no such agent.
    """
    preset = NAMES.get(name.lower())
    if preset is None:
        hint = did_you_mean(name, NAMES)
        raise UsageError(f"there is no agent {PREFIX}{name}: --preset help names agents{hint}")
    path = AGENTS / f"{preset}.pt"
    if not path.is_file():
        raise UsageError(
            f"no trained agent of the preset {preset} comes with TorchBeast: train one with python "
            f"-m torchbeast.monobeast --preset {preset}"
        )
    return path
