# SPDX-License-Identifier: Apache-2.0
"""Random nonsense over a live connection; scripts/fuzz.sh does it to the decoder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

SESSIONS = {
    "server": 100,
    "learner": 25,
    "door": 25,
    "host": 60,
}  # with each status or error that is asked for
_HERE = Path(__file__).parent


@pytest.mark.parametrize("peer", SESSIONS)
def test_nonsense_ends_its_stream_and_nothing_else(peer: str, tmp_path: Path) -> None:
    """In a process of its own, whose crash would be a finding too."""
    paths = [str(_HERE.parents[1]), str(_HERE.parent / "support"), str(_HERE)]
    fuzzing = warm.Popen(
        [sys.executable, str(_HERE / "fuzz_peers.py"), peer, "--sessions", str(SESSIONS[peer])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, errors = fuzzing.communicate(timeout=200)
    finally:
        fuzzing.kill()
    assert fuzzing.returncode == 0, errors[-4_000:]
    ends = json.loads(said.splitlines()[-1])
    assert sum(ends.values()) == SESSIONS[peer]
    is_learner = peer in ("learner", "host")
    refused = "ValueError" if is_learner else "INVALID_ARGUMENT"
    assert ends[refused] > 0 and len(ends) > 1, ends
