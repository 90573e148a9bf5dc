# SPDX-License-Identifier: Apache-2.0
"""The number of processor cores available to a program, and what torchrun tells each of the
processes that it starts, in environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torchbeast.errors import UsageError

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")

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


class Launch(NamedTuple):
    """This process among those of a run."""

    rank: int  # 0, ..., size - 1
    size: int  # number of processes, on all machines
    local_rank: int  # among those on this machine
    local_size: int  # number of processes on this machine


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns this process's place; None if it is the only one, with torchrun or without.

    Raises UsageError where there are several, but not all that they need to meet is set.
    """
    size = environ.get("WORLD_SIZE", "")
    if not size.isdecimal() or int(size) < 2:
        return None
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set: start the learners with "
            "torchrun, or one learner without WORLD_SIZE"
        )
    rank = int(environ["RANK"])
    local_rank = int(environ.get("LOCAL_RANK", rank))
    return Launch(rank, int(size), local_rank, learners_here(environ))


def learners_here(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun started on this machine; 1 without it."""
    number = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(number)) if number.isdecimal() else 1


def check_alone(program: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises UsageError if torchrun has started a program several times that runs only once."""
    size = environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"{program} runs in one process, but was started in {size} (WORLD_SIZE): start it "
            "without torchrun. Several learners that learn as one are torchrun "
            "--nproc_per_node=2 -m torchbeast.polybeast_learner"
        )
