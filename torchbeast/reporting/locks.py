# SPDX-License-Identifier: Apache-2.0
"""Locks of files, which keep other processes out until the file is closed or the process ends."""

from __future__ import annotations

import errno
import fcntl
from enum import Enum
from typing import IO

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Lock(Enum):
    """The result of trying to lock a file."""

    OURS = "ours"
    OTHERS = "another process has it"
    NONE = "its file system has no locks"  # Lustre with noflock, NFS without its lock daemon


def lock(file: IO[bytes], shared: bool = False) -> Lock:
    """Tries to lock an open file; shared: with others that lock it so too."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.OTHERS
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return Lock.NONE
        raise
    return Lock.OURS
