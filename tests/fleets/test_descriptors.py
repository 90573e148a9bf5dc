# SPDX-License-Identifier: Apache-2.0
"""How many files and connections a process may have open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import torchbeast
from torchbeast.fleets.system import allow_descriptors, allowed_descriptors, limit_kept

ALLOWED = """
import resource, sys
from torchbeast.fleets.system import allow_descriptors, allowed_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
allow_descriptors(*map(int, sys.argv[3:]))
print(allowed_descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most", "allowed"),
    [(50, 100, [], 100), (50, 100, [80], 80), (50, 100, [200], 100), (90, 100, [80], 90)],
)
def test_the_limit_is_raised_as_far_as_it_may_and_never_lowered(
    soft: int, hard: int, most: list[int], allowed: int
) -> None:
    run = [sys.executable, "-c", ALLOWED, *map(str, [soft, hard, *most])]
    env = os.environ | {"PYTHONPATH": str(Path(torchbeast.__file__).parents[1])}
    said = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(allowed), str(hard)]


def test_the_limit_is_put_back_once_nobody_needs_more() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = (200, before[1])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        with limit_kept():
            allow_descriptors(210)
            assert allowed_descriptors() == 210
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == usual
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
