# SPDX-License-Identifier: Apache-2.0
"""The number of processor cores available to a program."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torchbeast.processes.torchrun import learners_here

_SHARE = "TORCHBEAST_CORES"


def available_cores() -> int:
    """Returns the number of cores this process may use; containers and taskset limit it, and so
    does a program that starts several others, see `environment_of_share`. Learners that torchrun
    starts on one machine share its cores.
    """
    share = os.environ.get(_SHARE, "")
    return min(int(share), _cores()) if share.isdecimal() and int(share) else _cores()


def _cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // learners_here())


def environment_of_share(cores: int) -> Mapping[str, str]:
    """Returns the environment variables of a process that uses at most so many cores.

    The system still chooses the cores: a process that was bound to one would wait there for others.
    """
    return {_SHARE: str(cores), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}
