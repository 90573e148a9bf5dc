# SPDX-License-Identifier: Apache-2.0
"""The settings that a run records: in its checkpoints and in meta.json, by the names of flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import UsageError

# Flags of one command, not of a run.
OF_ONE_COMMAND = (
    "mode",
    "xpid",
    "savedir",
    "num_episodes",
    "sampled",
    "random_start",
    "preset",
    "suppress_logs",
    "address",
    "working_dir",
    "dashboard",
)

# Recorded apart: keyword arguments of a "module:attribute", as running servers reported them.
SERVED_KWARGS = "served_env_kwargs"


def recorded_env(env: EnvSpec, others_serve: bool) -> dict[str, Any]:
    """Returns name and keyword arguments of the environment, to be recorded.

    others_serve: whether running servers decide the environment. Arguments that they report for a
    "module:attribute" are recorded apart, because a server could name anything.
    """
    kwargs = dict(env.kwargs)
    if others_serve and env.is_factory:
        return {"env": env.name, "env_kwargs": {}, SERVED_KWARGS: kwargs}
    return {"env": env.name, "env_kwargs": kwargs}


def check_named(recorded: Mapping[str, Any], asked: EnvSpec) -> None:
    """Raises UsageError where a "module:attribute" would get keyword arguments that nobody typed.

    recorded: the settings of a checkpoint or of meta.json, which can come from anyone: with
    arguments of their choice, os:system runs any command.
    asked: what the command line names; an empty name or no arguments stand for the recorded ones.
    """
    name = recorded.get("env") or ""
    served, kwargs = recorded.get(SERVED_KWARGS), recorded.get("env_kwargs")
    if asked.kwargs or asked.name not in ("", name) or not EnvSpec(name).is_factory:
        return
    if served or (kwargs and not asked.name):
        typed = shlex.join(["--env", name, "--env_kwargs", json.dumps(served or kwargs)])
        raise UsageError(
            f"the run plays {name} with recorded keyword arguments: give {typed} to run it: "
            "a checkpoint's code is run only when you name it"
        )


def changes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each setting of a resumed run that differs from the recorded one.

    Settings that were not recorded, as in a run of another program, are left out, and so is the
    model, which cannot change. Before --env_kwargs was recorded there was no such flag.
    """
    recorded = {"env_kwargs": {}, **recorded}
    return [
        f"{name} {_plain(value)} (recorded {_plain(recorded[name])})"
        for name, value in now.items()
        if name in recorded and name not in (*OF_ONE_COMMAND, "model")
        if _plain(recorded[name]) != _plain(value)
    ]


def _plain(value: Any) -> Any:
    """Converts values so that those of the command line and of JSON can be compared."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    return list(value) if isinstance(value, tuple) else value
