# SPDX-License-Identifier: Apache-2.0
"""A learner has no more streams than its files and connections allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from background import wait_for
from serving import playing, served_elsewhere

from torchbeast.errors import UsageError
from torchbeast.servers import config
from torchbeast.servers.config import check_streams


def test_streams_beyond_the_limit_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "allowed_descriptors", lambda: 1024)
    check_streams(206)
    with pytest.raises(UsageError, match="207 streams need 1,028 .* may have 1,024 open: raise"):
        check_streams(207)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
def test_a_stream_takes_no_more_descriptors_than_are_counted_for_it(tmp_path: Path) -> None:
    with served_elsewhere(tmp_path / "socket"):
        before = len(os.listdir("/proc/self/fd"))
        with playing([f"unix:{tmp_path}/socket"] * 20) as game:
            wait_for(lambda: game.pool.live_streams() == 20)
            game.rollouts(20)
            taken = len(os.listdir("/proc/self/fd")) - before
    assert 20 < taken <= 20 * config._FILES_OF_A_STREAM
