# SPDX-License-Identifier: Apache-2.0
"""Settings of an earlier run to which the command line refers.

`--xpid NAME` alone resumes that run with its recorded settings, and `--mode test` alone evaluates
the latest run. Flags of the command line or its preset override recorded settings. If a setting
cannot be changed in a run, a different value is refused later.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchbeast.cli.learner_flags import LearnerFlags
from torchbeast.core.base.checks import names_with
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import CHECKPOINT, RunConfig, read_meta, run_path
from torchbeast.run.config import SERVED_KWARGS, check_named
from torchbeast.zoo import PREFIX


def recorded_settings(args: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that an earlier run determines for `args`, by the names of flags.

    If a run is tested, these are its name and the settings of its agent.
    """
    tests = is_test(args)
    needs_run = tests and not {"-h", "--help"} & {*args}
    xpid = given(args, "--xpid") or (_latest(_savedir(args)) if needs_run else None)
    if not xpid or Path(xpid).name != xpid:
        return {}
    if xpid.startswith(PREFIX) and (not tests or _follows(args)):
        raise UsageError(
            f"{xpid} is a trained agent, and not a run: add --mode test, without --follow, or use "
            "another --xpid"
        )
    folder = _savedir(args) / xpid
    found = _of_agent(folder, args) if tests else _recorded(folder, args)
    return found | {"xpid": xpid}


def is_test(args: Sequence[str]) -> bool:
    """Returns whether a command line evaluates a run."""
    return given(args, "--mode") in ("test", "test_render")


def given(args: Sequence[str], flag: str) -> str | None:
    """Returns the value of a flag in a command line, or None; the last one counts."""
    value = None
    for word, following in pairwise([*args, ""]):
        if word == flag and following and not following.startswith("--"):
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _follows(args: Sequence[str]) -> bool:
    value = given(args, "--follow")
    return "--follow" in args if value is None else value.lower() == "true"


def _savedir(args: Sequence[str]) -> Path:
    return RunConfig(savedir=given(args, "--savedir") or RunConfig.savedir).folder.parent


def _latest(savedir: Path) -> str:
    """Returns the name of the latest run, and prints it."""
    latest = savedir / "latest"
    if not latest.is_symlink() or not latest.exists():
        raise UsageError(
            f"there is no latest run in {savedir} to test: use --xpid, or another --savedir"
        )
    name = run_path(latest).resolve().name
    print(f"Testing the latest run, {name}.", flush=True)
    return name


def _of_agent(folder: Path, args: Sequence[str]) -> dict[str, Any]:
    """Returns the recorded flags of algorithm and network, or {} without a checkpoint.

    With --follow the run need not have a checkpoint yet; the first one then determines the flags.
    """
    if not run_path(folder).exists() or _follows(args):
        return {}
    flags = _of_checkpoint(folder / (given(args, "--checkpoint") or CHECKPOINT)) or {}
    return {name: flags[name] for name in names_with("agent", LearnerFlags) if name in flags}


def _of_checkpoint(path: Path) -> dict[str, Any] | None:
    """Returns the flags recorded in the checkpoint, or None without a checkpoint."""
    path = run_path(path)
    if not any(path.parent.glob(f"*{path.suffix}")):
        return None
    from torchbeast.run.earlier_run import EarlierRun  # imports torch

    return dict(EarlierRun.newest(path, ("flags",)).recorded) or None


def _recorded(folder: Path, args: Sequence[str]) -> dict[str, Any]:
    """Returns the flags recorded in the checkpoint, or {} if the run does not exist.

    Without a checkpoint, the flags come from meta.json; but if the run ended before its first
    update, perhaps because of its settings, a command that names a task starts over.
    """
    if (flags := _of_checkpoint(folder / CHECKPOINT)) is not None:
        return flags
    if not (meta := read_meta(folder)):
        return {}
    logs = folder / "logs.csv"
    has_learnt = logs.exists() and logs.stat().st_size > 0
    if not has_learnt and any(given(args, flag) for flag in ("--env", "--preset", "--algo")):
        print(
            f"The earlier run in {folder} ended before its first update. Starting over with the "
            "settings given here, not those of the earlier run.",
            flush=True,
        )
        return {}
    print(
        f"{folder} has no checkpoint: starting again from step 0, with the settings in meta.json "
        "and a new logs.csv. Earlier rows are in logs.earlier.csv.",
        flush=True,
    )
    return dict(meta.get("args", {}))


def usable(
    flags_type: type[LearnerFlags], recorded: Mapping[str, Any], args: Sequence[str]
) -> dict[str, Any]:
    """Returns the recorded flags that this program has and restores, with valid values.

    args: the command line. If it names other machines, recorded servers of this one are ignored.
    """
    of_command = names_with("command", flags_type) - {"xpid"}  # the name is looked up
    left_out = of_command | names_with("served", flags_type)
    if given(args, "--env_servers") or given(args, "--listen"):
        left_out.add("pipes_basename")
    values = {}
    for name, kind in kinds(flags_type):
        if name in recorded and name not in left_out:
            value = recorded[name]
            if isinstance(value, list) and not _is_of(kind, value):
                value = tuple(value)  # JSON has no tuples
            if _is_of(kind, value) and (name, value) != ("env", "unknown"):
                values[name] = value
    return values


def check_algorithm(args: Sequence[str], algo: str, recorded: Mapping[str, Any]) -> None:
    """Raises UsageError if a run would resume with another algorithm.

    A learner checks it too, but the recorded settings may not suit the other algorithm's checks.
    """
    if is_test(args) or recorded.get("algo", algo) == algo:
        return
    from torchbeast.run.earlier_run import EarlierRun  # imports torch

    earlier = EarlierRun.newest(_savedir(args) / recorded["xpid"] / CHECKPOINT, ("flags",))
    try:
        earlier.check_same_algorithm(algo)
    except UsageError as error:
        raise UsageError(f"--{error}") from None


def check_environment(
    args: Sequence[str], values: Mapping[str, Any], recorded: Mapping[str, Any]
) -> None:
    """Raises UsageError if a run would resume in a "module:attribute" with keyword arguments that
    the command line does not name.

    values: settings of the run and of a preset that replace defaults. recorded: all settings that
    the run recorded.
    """
    if "env" in values and given(args, "--env_kwargs") is None:
        served = {SERVED_KWARGS: recorded.get(SERVED_KWARGS)}
        check_named({**values, **served}, EnvSpec(given(args, "--env") or ""))


def kinds(flags_type: type) -> Iterator[tuple[str, Any]]:
    """Yields the name and type of every flag."""
    hints = get_type_hints(flags_type)
    for field in dataclasses.fields(flags_type):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from kinds(hints[field.name])
        else:
            yield field.name, hints[field.name]


def _is_of(kind: Any, value: Any) -> bool:
    """Returns whether the value is valid for a flag of this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_of(argument, value) for argument in arguments)
    if origin is Literal:
        return value in arguments
    allowed = (int, float) if kind is float else origin or kind
    return isinstance(value, allowed) and not (kind in (int, float) and isinstance(value, bool))
