# SPDX-License-Identifier: Apache-2.0
"""The agents of a sweep: all combinations of the values, each with a name and a command line.

The sweep records in its folder what it compares, so that its name suffices to continue it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchbeast.cli.command_line import by_its_name, flag_names, flatten, parse
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.cli.learner_flags import LearnerFlags, MonoBeastFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.core.base.checks import names_with
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import UsageError
from torchbeast.on_ray.config import is_own_code
from torchbeast.reporting.loggers import DisplayConfig, LogConfig
from torchbeast.reporting.run_folder import read_meta
from torchbeast.run.config import CheckpointConfig, HardwareConfig, check_named
from torchbeast.sweep.config import ProgramName, SchedulerName, SweepConfig
from torchbeast.sweep.search import SEED, Values, settings_of_agents, values_of

FLAGS: Mapping[ProgramName, type[LearnerFlags]] = {
    "monobeast": MonoBeastFlags,
    "polybeast": PolyBeastFlags,
    "raybeast": RayBeastFlags,
}
_LONGEST_NAME = 120
_RECORDED = ("set", "program", "trials", "search", "shared_replay", "rounds")
_OF_SWEEP = {  # flags of the program that only the sweep may give
    "xpid": "agents of a sweep are named after their settings: use --name for the sweep",
    "savedir": "all agents of a sweep are in its folder: use --savedir once, outside --set",
    "mode": "a sweep only trains: remove --mode, and test agents with their own program",
    "replay_service": "a sweep starts the replay of its agents: use --shared_replay instead",
    "suppress_logs": "a sweep prints one table of its agents: remove --suppress_logs",
}


@dataclass(frozen=True, kw_only=True)
class AgentRun:
    """An agent to train. Other processes get it as JSON."""

    name: str
    settings: Mapping[str, str]  # the values that the sweep varies, by their flags, as typed
    program: ProgramName
    words: Sequence[str]  # command line of the program
    folder: Path  # of its run
    total_steps: int
    episodes: int  # number of last episodes whose returns are averaged
    seed: int | None  # None: it draws one
    has_own_code: bool = False  # whether nodes must import a module of the user
    evaluates: bool = False  # whether its last weights are evaluated

    @property
    def compared(self) -> dict[str, str]:
        """The settings without the seed. Agents with equal ones are ranked together."""
        return {key: value for key, value in self.settings.items() if key != SEED}


def agents_of(plan: SweepPlan, folder: Path) -> list[AgentRun]:
    """Returns an agent for each combination of the values, or for each trial; folder: of the sweep.

    Raises UsageError unless the program accepts the command line of every agent.
    """
    known = flag_names(FLAGS[plan.program])
    keys = [flag_of(f"--{key}", known) for key in plan.values]
    if len({*keys}) < len(keys):
        raise UsageError(
            f"--set has {', '.join(plan.values)}, which name the same flag twice: use one name"
        )
    for key, sentence in _OF_SWEEP.items():
        if key in [*keys, *(flag_of(word, known) for word in plan.words)]:
            raise UsageError(sentence)
    # A shared replay holds rollouts with the same shape, of the same task.
    of_task = names_with("task", FLAGS[plan.program]) | names_with("atari", FLAGS[plan.program])
    shared = {"preset", "replay_size", "unroll_length"} | of_task
    for key in keys if plan.config.shared_replay else ():
        if key in shared:
            raise UsageError(
                f"agents that share a replay have the same {key}, so --set cannot vary it: use "
                f"--{key} once, or remove --shared_replay"
            )
    return [_agent(plan, settings, folder) for settings in plan.settings()]


def as_words(settings: Mapping[str, str]) -> list[str]:
    """Returns settings as words of a command line."""
    flags = {"true": "--{}", "false": "--no_{}"}  # flags without a value
    return [
        flags.get(value.lower(), "--{}={}").format(key, value) for key, value in settings.items()
    ]


def flag_of(word: str, known: Sequence[str]) -> str:
    """Returns the name of the flag in a word of a command line, or "" in another word.

    known: the names of the program's flags.
    """
    if not word.startswith("--"):
        return ""
    flag = by_its_name(word, known)
    return flag.partition("=")[0].removeprefix("--").removeprefix("no_")


def _agent(plan: SweepPlan, settings: Mapping[str, str], folder: Path) -> AgentRun:
    """Returns the agent, if the program accepts its command line."""
    name = name_of(settings)
    words = [*plan.words, *as_words(settings)]
    # The address of a shared replay comes later.
    later = ["--replay_service=later"] if plan.config.shared_replay else []
    flags = parse(FLAGS[plan.program], plan.program, [*words, *later], flag_names(SweepConfig))
    values = flatten(flags)
    if plan.typed is not None:  # anyone may have recorded the other words
        env = values["env"] or ""
        is_typed = any(env in word for word in plan.typed)
        check_named(values, EnvSpec(env if is_typed else ""))
    where = ["--savedir", str(folder), "--xpid", name, "--suppress_logs"]
    if pool := values.get("selfplay"):  # each run needs versions of its own
        where += ["--selfplay", str(Path(pool) / name)]
    schedules = [value for key, value in values.items() if key.endswith("_schedule")]
    named = [*map(values.get, ("env", "model", "algo", "callback")), *schedules]
    return AgentRun(
        name=name,
        settings=settings,
        program=plan.program,
        words=[*words, *where],
        folder=folder / name,
        total_steps=flags.training.total_steps,
        episodes=flags.display.episodes_for_avg,
        seed=flags.run.seed,
        has_own_code=is_own_code(*named),
        evaluates=flags.callbacks.eval_every is not None,
    )


def name_of(settings: Mapping[str, str]) -> str:
    """Returns the name of a folder that contains the settings, possibly shortened."""
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    plain = re.sub(r"[^\w.,=+-]", "_", text)
    if plain == text and len(text) <= _LONGEST_NAME:
        return text
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The agents that a sweep trains.

    Attributes:
        config: The settings of the sweep, all of them chosen.
        words: The flags that all agents have.
        typed: The words of a command that continues a sweep; None: all words are typed.
    """

    config: SweepConfig
    words: list[str]
    typed: Sequence[str] | None = None

    @property
    def values(self) -> Values:
        """The values to compare, by their flags."""
        return values_of(self.config.set)

    @property
    def program(self) -> ProgramName:
        """The program that trains the agents."""
        return self.config.program or "monobeast"

    def record(self) -> dict[str, Any]:
        """Returns the entries of meta.json: what a sweep that continues may not change."""
        of_sweep = {name: getattr(self.config, name) for name in _RECORDED}
        values = [f"{key}={','.join(texts)}" for key, texts in self.values.items()]
        return {**of_sweep, "set": values, "program": self.program, "words": self.words}

    def settings(self) -> list[dict[str, str]]:
        """Returns the settings of each agent, by their flags."""
        return settings_of_agents(self.values, self.config.trials, self.config.search)

    def flags(self) -> dict[str, Any]:
        """Returns the flags of the sweep, and every flag of the first agent, by name. The seeds to
        compare are left out: a sweep that continues may have others.
        """
        record = self.record()
        of_sweep = {f"--{name}": record[name] for name in _RECORDED}
        texts = [f"{SEED}=..." if text.startswith(f"{SEED}=") else text for text in record["set"]]
        first = {key: "0" if key == SEED else value for key, value in self.settings()[0].items()}
        words = [*self.words, *as_words(first)]
        of_first = flatten(parse(FLAGS[self.program], self.program, words))
        return of_sweep | {"--set": " ".join(texts)} | of_first


def sweep_plan(config: SweepConfig, words: Sequence[str], folder: Path) -> SweepPlan:
    """Returns the plan of a command line, completed by what an earlier part of the sweep recorded.

    words: the command line without the flags of the sweep.

    Raises UsageError if command line and record differ.
    """
    recorded = _recorded(folder)
    before = recorded or SweepPlan(config=SweepConfig(), words=[])
    if not (before.config.set or config.set):
        raise UsageError(
            "expected the flags to vary with their values, such as --set "
            "learning_rate=0.0003,0.0006; a single run needs no sweep"
        )
    is_repeated = before.words[len(before.words) - len(words) :] == list(words)
    now = SweepPlan(
        config=_completed(config, before.config),
        words=before.words if is_repeated else [*before.words, *words],  # the last one counts
        typed=None if recorded is None else [*config.set, *words],
    )
    if now.config.address and now.config.on == "local" and now.program != "raybeast":
        raise UsageError(
            "--address is the cluster of --on ray, or of agents of raybeast: add --on ray, or "
            "remove --address"
        )
    if recorded is not None and now.record() != recorded.record():
        _check_same(recorded.flags(), now.flags(), folder)
    return now


def _completed(config: SweepConfig, before: SweepConfig) -> SweepConfig:
    """Returns the settings of a command line, or else of the earlier part of the sweep."""
    is_population = before.rounds is not None or config.scheduler == "pbt"
    if is_population and config.scheduler == "asha":
        raise UsageError(
            "a sweep with --scheduler pbt cannot continue with asha: remove --scheduler asha"
        )
    chosen = {name: getattr(config, name) or getattr(before, name) for name in _RECORDED}
    chosen["search"] = (config if config.trials else before).search
    if is_population:
        chosen |= {"scheduler": "pbt", "rounds": chosen["rounds"] or 10}
    return replace(config, **chosen)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raises UsageError if settings differ that a continued sweep may not change, because its
    agents would not remain comparable.
    """
    others = (CheckpointConfig, DisplayConfig, HardwareConfig, LogConfig)
    may_change = {"total_steps", *(name for config in others for name in flag_names(config))}
    may_change |= names_with("command", *FLAGS.values())
    for name, value in now.items():
        if name not in may_change and before.get(name) != value:
            raise UsageError(
                f"the sweep {folder.name} compares agents with {name} {before.get(name)}, not with "
                f"{name} {value}: remove it, or use another --name"
            )


def _recorded(folder: Path) -> SweepPlan | None:
    """Returns the plan that an earlier part of the sweep recorded, or None for a new sweep.

    Raises UsageError if the folder is not the folder of a sweep.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        args = read_meta(folder)["args"]
        of_sweep = {name: args[name] for name in _RECORDED}
        scheduler: SchedulerName = "none" if args["rounds"] is None else "pbt"
        of_sweep |= {"set": tuple(args["set"]), "scheduler": scheduler}
        return SweepPlan(config=SweepConfig(**of_sweep), words=args["words"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{folder} is not the folder of a sweep: use another --name, or another --savedir"
        ) from None
