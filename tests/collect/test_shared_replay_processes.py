# SPDX-License-Identifier: Apache-2.0
"""The process of a shared replay: it and its agents are killed, at any moment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from background import wait_for
from later import later
from replay_agent import COUNT, MOMENTS, B, K, S, T, how
from shared_running import agent_of
from true_rows import Envs, empty_batch

from torchbeast.collect.shared_replay import SharedReplayClient, serving
from torchbeast.errors import RunError

LATE = 60.0  # seconds, for processes to start


@pytest.mark.parametrize("moment", [m if "within" in m else later(m) for m in MOMENTS])
def test_agents_go_on_when_another_is_killed(tmp_path: Path, moment: str) -> None:
    envs = Envs(1, T, K)
    with serving(tmp_path / "made") as served:
        with agent_of(Path(served.address), how("living")) as living:
            words = [sys.executable, "-m", "replay_agent", served.address, moment]
            folder = Path(__file__).parent
            dying = subprocess.run(words, cwd=folder, timeout=LATE, capture_output=True)
            assert dying.returncode == -signal.SIGKILL, dying.stderr.decode()
            for _ in range(3):
                living.insert(envs.batch([envs.next_rollout(1, i) for i in range(B)]))
            inserted = {"joined": 0, "before the answer": COUNT + 1, "at the end": COUNT + 1}
            assert living.stats().size == B * T * (3 + inserted.get(moment, COUNT))
            if moment != "joined":
                assert living.fill(empty_batch(T, B + S, K), slice(B, B + S), 0) is not None
        with agent_of(Path(served.address), how("dying")) as again:
            again.insert(envs.batch([envs.next_rollout(1, i) for i in range(B)]))
        assert served.failure is None


def test_a_killed_service_ends_its_agents_and_is_told_to_who_started_it(tmp_path: Path) -> None:
    with serving(tmp_path / "made") as served:
        with agent_of(Path(served.address), how("a")) as agent:
            os.kill(served.pid, signal.SIGKILL)
            wait_for(lambda: served.failure is not None)
            with pytest.raises(RunError, match="has ended; progress is saved in the checkpoint"):
                agent.fill(empty_batch(T, B + S, K), slice(B, B + S), None)
    assert "was killed by SIGKILL" in str(served.failure)
    assert list(tmp_path.iterdir()) == [], "the socket is removed"


def test_the_service_ends_with_its_parent_and_removes_what_it_has_made(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from torchbeast.collect.shared_replay import serving\n"
        "with serving(pathlib.Path(sys.argv[1])) as served:\n"
        "    print(served.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    folder = tmp_path / "made"
    words = [sys.executable, "-c", code, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert (folder / "replay.sock").exists()
        parent.kill()
    wait_for(lambda: not _lives(pid))
    assert list(tmp_path.iterdir()) == []


def _lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_service_ends_with_the_block(tmp_path: Path) -> None:
    with serving(tmp_path / "deep" / "folder") as served:
        assert (tmp_path / "deep" / "folder").stat().st_mode & 0o777 == 0o700
        assert served.failure is None
        agent = SharedReplayClient(served.address, how("a"))
    assert not _lives(served.pid) and not (tmp_path / "deep" / "folder").exists()
    assert served.failure is None
    said = "has ended; progress is saved .*--replay_service"
    with contextlib.closing(agent), pytest.raises(RunError, match=said):
        agent.fill(empty_batch(T, B + S, K), slice(B, B + S), None)


def test_the_folder_of_a_service_that_is_killed_is_removed(tmp_path: Path) -> None:
    with serving(tmp_path / "made") as served:
        os.kill(served.pid, signal.SIGKILL)
        wait_for(lambda: not _lives(served.pid))
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_cannot_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="AF_UNIX path too long"):
        with serving(tmp_path / ("x" * 120)):
            pass
    assert list(tmp_path.iterdir()) == []


def test_the_service_loads_no_torch() -> None:
    code = (
        "import sys, torchbeast.collect.shared_replay\n"
        "print([name for name in ('torch', 'libtorchbeast', 'ray') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LATE
    )
    assert found.stdout.strip() == "[]", found.stderr
