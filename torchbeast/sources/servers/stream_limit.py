# SPDX-License-Identifier: Apache-2.0
"""The files and connections that the streams of a learner take, whose number is limited."""

from __future__ import annotations

import resource

from torchbeast.errors import UsageError
from torchbeast.processes.descriptors import allowed_descriptors

_OF_A_STREAM = 4  # its connection, and what gRPC wakes its threads with: 3.25 were counted
_OF_THE_REST = 200  # files of the program, and of libraries


def most_streams() -> int:
    """Returns how many streams this process may have."""
    allowed = allowed_descriptors()
    return max(1, (allowed - _OF_THE_REST) // _OF_A_STREAM) if _is_limited(allowed) else 1 << 16


def _is_limited(allowed: int) -> bool:
    return allowed != resource.RLIM_INFINITY


def check_streams(count: int) -> None:
    """Raises UsageError if this process may not have so many streams: gRPC would end the process
    where it gets no more descriptors.
    """
    needed, allowed = _OF_A_STREAM * count + _OF_THE_REST, allowed_descriptors()
    if _is_limited(allowed) and needed > allowed:
        raise UsageError(
            f"{count:,} streams need {needed:,} files and connections, but this process may have "
            f"{allowed:,} open: raise the limit (ulimit -n), or serve more environments in a "
            "stream (fewer --num_servers)"
        )
