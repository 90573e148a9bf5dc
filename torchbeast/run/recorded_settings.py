# SPDX-License-Identifier: Apache-2.0
"""The settings that a run records: in its checkpoints and in meta.json, by the names of flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from torchbeast.core.base.checks import typed
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import OF_ONE_COMMAND, REACHING

# Recorded separately: keyword arguments of a "module:attribute" that running servers reported.
SERVED_KWARGS = "served_env_kwargs"


def recorded_env(env: EnvSpec, others_serve: bool) -> dict[str, Any]:
    """Returns the entries that record the environment's name and keyword arguments.

    others_serve: whether running servers decide the environment. The arguments that they report for
    a "module:attribute" are recorded separately, because a server could report anything.
    """
    kwargs = dict(env.kwargs)
    if others_serve and env.is_factory:
        return {"env": env.name, "env_kwargs": {}, SERVED_KWARGS: kwargs}
    return {"env": env.name, "env_kwargs": kwargs}


def reaching_flags(recorded: Mapping[str, Any]) -> list[str]:
    """Returns the flags that belong to the command, so that the next command must repeat them."""
    given = {name: recorded[name] for name in REACHING if recorded.get(name)}
    words = ([f"--{k}"] if v is True else typed(f"--{k}", v) for k, v in given.items())
    return [word for flag in words for word in flag]


def naming_flags(recorded: Mapping[str, Any]) -> list[str]:
    """Returns the flags with which a command passes `check_named` for these settings."""
    name = recorded.get("env") or ""
    served, kwargs = recorded.get(SERVED_KWARGS), recorded.get("env_kwargs")
    if not (served or kwargs) or not EnvSpec(name).is_factory:
        return []
    return ["--env", name, *(["--env_kwargs", json.dumps(served)] if served else [])]


def check_named(recorded: Mapping[str, Any], asked: EnvSpec) -> None:
    """Raises UsageError if a "module:attribute" would get keyword arguments that nobody typed.

    recorded: the settings of a checkpoint or of meta.json. These files can come from anyone, and
    os:system with arguments of their choice would run any command. Without arguments it is called
    in any case: a foreign checkpoint can call functions of this machine's modules, but not pass
    arguments to them. asked: the environment that the command line names; an empty name or empty
    arguments stand for the recorded ones.
    """
    name, needed = recorded.get("env") or "", naming_flags(recorded)
    if not needed or asked.kwargs or asked.name not in ("", name):
        return
    if not asked.name or "--env_kwargs" in needed:
        kwargs = json.dumps(_env_kwargs(recorded))
        raise UsageError(
            f"the run's record, which could be anyone's, calls {name} with the arguments {kwargs}: "
            f"if you trust it, add {shlex.join(needed)}"
        )


def _env_kwargs(settings: Mapping[str, Any]) -> Any:
    """Returns the environment's keyword arguments, from servers or flags; {} in old records."""
    return settings.get(SERVED_KWARGS) or settings.get("env_kwargs", {})


def changes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each setting of a resumed run that differs from the recorded one.

    It skips settings that were not recorded, for example by another program, and the model, which
    cannot change.
    """
    recorded = {**recorded, "env_kwargs": _env_kwargs(recorded)}
    if "env_kwargs" in now:
        now = {**now, "env_kwargs": _env_kwargs(now)}
    return [
        f"{name} {_plain(value)} (recorded {_plain(recorded[name])})"
        for name, value in now.items()
        if name in recorded and name not in (*OF_ONE_COMMAND, SERVED_KWARGS, "model")
        if _plain(recorded[name]) != _plain(value)
    ]


def _plain(value: Any) -> Any:
    """Converts a value so that values of the command line and of JSON can be compared."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    return list(value) if isinstance(value, tuple) else value
