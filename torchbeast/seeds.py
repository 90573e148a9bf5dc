# SPDX-License-Identifier: Apache-2.0
"""One seed tree: every generator of a run gets its own seed, derived from the root by a path.

    seed_of(root, "actor", 3, "environments")      root -> program's part -> stream -> environments

Two different paths give independent seeds; the same path gives the same seed on every machine.
What is below "environments" is derived by `environment_seeds`, one for each environment.
"""

from __future__ import annotations

import zlib

import numpy as np


def seed_of(root: int, *path: int | str) -> int:
    """A seed in 0, ..., 2**31 - 1 for what this path names."""
    words = [_word(part) for part in path]
    return int(np.random.SeedSequence(root, spawn_key=words).generate_state(1)[0] >> 1)


def _word(part: int | str) -> int:
    # Python's own hash of a string differs from process to process.
    return zlib.crc32(part.encode()) if isinstance(part, str) else part
