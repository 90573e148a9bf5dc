# SPDX-License-Identifier: Apache-2.0
"""The settings that a run records: in its checkpoints and in meta.json, by the names of flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Flags of one command, not of a run.
OF_ONE_COMMAND = ("mode", "xpid", "savedir", "num_episodes", "sampled", "random_start", "preset")


def changes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each setting of a resumed run that differs from the recorded one.

    Settings that were not recorded, as in a run of another program, are left out, and so is the
    model, which cannot change.
    """
    return [
        f"{name} {_plain(value)} (recorded {_plain(recorded[name])})"
        for name, value in now.items()
        if name in recorded and name not in (*OF_ONE_COMMAND, "model")
        if _plain(recorded[name]) != _plain(value)
    ]


def _plain(value: Any) -> Any:
    """Converts values so that those of the command line and of JSON can be compared."""
    if isinstance(value, Mapping):
        return json.dumps(value)
    return list(value) if isinstance(value, tuple) else value
