# SPDX-License-Identifier: Apache-2.0
"""A tree of seeds: every random generator of a run gets its own, derived from a root and a path.

    seed_of(root, "actor", 3, "environments")      root -> component -> stream -> environments

Different paths give independent seeds; the same path gives the same seed on every machine. The
seeds of single environments, below "environments", are derived by `environment_seeds`.
"""

from __future__ import annotations

import zlib

import numpy as np


def seed_of(root: int, *path: int | str) -> int:
    """Returns the seed of a path, in 0, ..., 2**31 - 1."""
    # Python's hash of a string differs between processes.
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence(root, spawn_key=words).generate_state(1)[0] >> 1)
