# SPDX-License-Identifier: Apache-2.0
"""The zoo: tuned settings for many tasks, the scores that they reach, and trained agents.

presets.ini      the settings, which `--preset NAME` makes the defaults; flags override them
records.json     their scores over seeds that were held out
agents/NAME.pt   the policy of one of these seeds

atari_scores.csv has what others reached in Atari games.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from configparser import ConfigParser, SectionProxy
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.core.base.checks import counted, did_you_mean
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
        flags = self.flags
        return flags["env"], flags.get("algo", "impala")


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


class Record(NamedTuple):
    """The score of a preset over runs that differ in their seed.

    Attributes:
        score: Interquartile mean, over the seeds, of the mean return of 100 greedy episodes.
        interval: The ends of its 95 % interval.
        seeds: Number of runs.
        steps: Environment steps of each run.
        minutes: Median training time on two shared cores.
        agent: Of the agent that the package contains, which is one of these runs: its seed, its
            score (mean return of 100 greedy episodes), their spread (standard deviation), and the
            commit that trained it. None without an agent.
    """

    score: float
    interval: Sequence[float]
    seeds: int
    steps: int
    minutes: float
    agent: Mapping[str, Any] | None = None


@functools.cache
def records() -> Mapping[str, Record]:
    """Returns the scores that presets have reached, by the name of the preset."""
    read = json.loads((_FOLDER / "records.json").read_text(encoding="utf-8"))
    return {name: Record(**entry) for name, entry in read.items()}


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


_INDENT = 30  # of the sentences of the overview
_NOTE = (
    "Score: interquartile mean over held-out seeds, with a 95 % confidence interval. Minutes: on "
    "two cores of a shared machine. --preset help:PART prints the flags of all presets with PART "
    "in their name."
)


def chosen_settings(name: str | None) -> Mapping[str, Any]:
    """Returns the flags of a preset, by name on the command line; {} for None.

    Raises UsageError for an unknown preset. `help` prints an overview, `help:PART` the flags of the
    presets with PART in their name, and both exit.
    """
    if name is None:
        return {}
    name = name.lower()
    if name in NAMES:
        return PRESETS[NAMES[name]].flags
    asks, _, part = name.partition(":")
    if asks != "help":
        raise _unknown(name)
    if part:
        print("\n".join(_with_flags(part)))
    else:
        print(_overview(PRESETS), *_wrapped(_NOTE, "", ""), sep="\n")
    raise SystemExit(0)


def with_interval(score: float, low: float, high: float) -> str:
    """Returns a score with its interval, to print."""
    score_in_words, *ends = (
        f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}" for value in (score, low, high)
    )
    return f"{score_in_words} [{', '.join(ends)}]"


def _unknown(name: str) -> UsageError:
    if name and (found := _with_part(name)):
        return UsageError(f"there is no preset {name!r}, use one of these:\n{_overview(found)}")
    hint = did_you_mean(name, NAMES) or "."
    return UsageError(f"there is no preset {name!r}{hint} --preset help lists all presets")


def _with_part(part: str) -> list[str]:
    """Returns the presets that have a part in their name, or in an earlier one."""
    return list(dict.fromkeys(name for spelt, name in NAMES.items() if part in spelt))


def _overview(names: Iterable[str]) -> str:
    """Describes presets by family, in lines that fit the terminal."""
    lines = []
    for family, of_family in groupby(names, lambda name: PRESETS[name].family):
        lines.append(f"{family}:")
        for name in of_family:
            lines += _wrapped(_described(name), f"  {name} ".ljust(_INDENT), " " * _INDENT)
    return "\n".join(lines)


def _described(name: str) -> str:
    """Returns the sentence of a preset, and what its record says."""
    preset, record = PRESETS[name], records().get(name)
    also = f" Alias: {', '.join(preset.also)}." if preset.also else ""
    sentence = f"{preset.sentence}{also}"
    if record is None:
        return sentence
    score = with_interval(record.score, *record.interval)
    runs, minutes = counted(record.seeds, "seed"), max(1, round(record.minutes))
    agent = f" Agent: {PREFIX}{name}." if record.agent else ""
    return f"{sentence} Score {score}, {runs}, {minutes} min.{agent}"


def _with_flags(part: str) -> Iterator[str]:
    """Yields lines about the presets that have a part in their name, with flags to paste."""
    if not (names := _with_part(part)):
        raise _unknown(part)
    for name in names:
        yield name
        yield from _wrapped(_described(name), "  ", "  ")
        flags = re.sub(" (?!--)", "\0", PRESETS[name].words)  # a value stays on its flag's line
        yield " \\\n".join(_wrapped(flags, "  ", "  ")).replace("\0", " ")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Breaks a text into lines that fit the terminal; first, others: how lines begin."""
    width = shutil.get_terminal_size().columns - len(" \\")
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
