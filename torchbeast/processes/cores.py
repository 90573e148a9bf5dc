# SPDX-License-Identifier: Apache-2.0
"""The number of processor cores available to a program."""

from __future__ import annotations

import os
from collections.abc import Mapping

_SHARE = "TORCHBEAST_CORES"


def available_cores() -> int:
    """Returns the number of cores this process may use; containers and taskset limit it, and so
    does a program that starts several others, see `environment_of_share`.
    """
    share = os.environ.get(_SHARE, "")
    return min(int(share), _cores()) if share.isdecimal() and int(share) else _cores()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment_of_share(cores: int) -> Mapping[str, str]:
    """Returns the environment variables of a process that uses at most so many cores.

    The system still chooses the cores: a process that was bound to one would wait there for others.
    """
    return {_SHARE: str(cores), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}
