# SPDX-License-Identifier: Apache-2.0
"""Two learners that learn as one, in processes that meet as torchrun lets them."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from background import SOON
from one_replica import UPDATES
from test_learner_run import plan_of
from test_training import ListSource

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.config import ReplayConfig, RolloutConfig
from torchbeast.core.update.torch_ranks import RankGone, store_of_torchrun
from torchbeast.errors import RunError, UsageError, exit_code_of
from torchbeast.fleets.system import Launch
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import HardwareConfig
from torchbeast.run.plan import Plan
from torchbeast.run.replicas import Replica, _named

TESTS = Path(__file__).parents[1]
PATH = [str(TESTS / "run"), str(TESTS / "support"), str(TESTS.parent)]
END_S = 120.0  # programs import torch first, on a machine that may be busy
NOTICED_S = 15.0  # that a process is gone
FLAGS = ["--algo", "impala", "--model", "mlp", "--batch_size", "4", "--torch_threads", "1"]
FLAGS += ["--unroll_length", "5", "--total_steps", "10000", "--xpid", "run", "--seed", "5"]


class Learners:
    """Processes of one_replica.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, case: str, size: int, savedirs: list[str], *more: str) -> None:
        """Starts `size` ranks, or a learner alone."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        clean = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD" not in k}
        clean |= {"PYTHONPATH": os.pathsep.join(PATH), "TMPDIR": str(self.folder)}
        script, pipe = str(TESTS / "run" / "one_replica.py"), subprocess.PIPE
        for rank in range(size):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            several = {k: str(v) for k, v in (place | meeting).items()} if size > 1 else {}
            where = ["--savedir", str(self.folder / savedirs[rank])]
            words = [sys.executable, script, case, *FLAGS, *more, *where]
            env = clean | several
            self._started.append(warm.Popen(words, stdout=pipe, stderr=pipe, text=True, env=env))
        self.running = self._started[-size:]

    def event(self, rank: int, name: str) -> dict[str, Any]:
        """Returns the next event of a rank that has an entry of this name."""
        stdout = self.running[rank].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{") and name in (event := json.loads(line)):
                return event
        raise AssertionError(f"rank {rank} ended without {name}: {self.running[rank].stderr}")

    def ends(self) -> list[tuple[int, str]]:
        """Waits for all; returns exit codes and what they said on stderr."""
        said = [process.communicate(timeout=END_S)[1] for process in self.running]
        return [(p.returncode, text) for p, text in zip(self.running, said, strict=True)]

    def checkpoint(self, savedir: str) -> dict[str, Any]:
        return checkpoints.load(self.folder / savedir / "run" / "model.tar")

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate(timeout=SOON)


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[Learners]:
    made = Learners(tmp_path)
    yield made
    made.close()


def test_two_learners_learn_what_one_learns_from_their_joined_batches(learners: Learners) -> None:
    """Their weights are equal bit by bit, and those of the one learner up to float32's rounding.

    The second rank has another --savedir, as on another machine: it resumes from rank 0's
    checkpoint, and leaves nothing.
    """
    seeds = set()
    for part in (1, 2):
        learners.start("ends", 1, ["alone"])
        learners.event(0, "weights")
        assert learners.ends()[0][0] == 0
        learners.start("ends", 2, ["both", "other"])
        first, second = (learners.event(rank, "weights") for rank in range(2))
        assert [code for code, _ in learners.ends()] == [0, 0]
        assert first["weights"] == second["weights"]
        assert first["draw"] != second["draw"]
        seeds |= {first["seed"], second["seed"]}
        assert len(seeds) == 2 * part, "no rank or part repeats the episodes of another"
        one, two = learners.checkpoint("alone"), learners.checkpoint("both")
        assert two["scheduler_state_dict"] == one["scheduler_state_dict"]
        assert two["scheduler_state_dict"]["version"] == part * UPDATES
        assert two["stats"]["step"] == one["stats"]["step"] > 0
        assert two["stats"]["episodes"] == one["stats"]["episodes"] > 0
        for name, value in one["model_state_dict"].items():
            torch.testing.assert_close(two["model_state_dict"][name], value, rtol=1e-4, atol=1e-6)
    assert two["flags"]["batch_size"] == 4, "the total, with which any number of ranks resumes"
    rows = [list(read_logs(learners.folder / name / "run")) for name in ("alone", "both")]
    for one_row, both_row in zip(*rows, strict=True):
        for name in ("step", "episodes", "mean_episode_return", "mean_lag", "total_loss"):
            assert both_row.get(name) == pytest.approx(one_row.get(name), rel=1e-4), name
        assert both_row["collected_steps"] == 2 * one_row["collected_steps"]
    assert sorted(p.name for p in learners.folder.iterdir()) == ["alone", "both"]


def test_a_killed_rank_ends_the_others_after_a_checkpoint_of_the_last_update(
    learners: Learners,
) -> None:
    learners.start("waits", 2, ["a", "a"])
    learners.event(1, "waits")
    killed = time.monotonic()
    learners.running[1].kill()
    (code, said), _ = learners.ends()
    assert time.monotonic() - killed < NOTICED_S
    assert code == 1 and "another learner has ended, or cannot be reached" in said
    assert "gloo" not in said and ".cc" not in said, "only the log is about torch's own code"
    log = (learners.folder / "a" / "run" / "out.log").read_text()
    assert "torch.distributed: " in log
    assert learners.checkpoint("a")["scheduler_state_dict"]["version"] == UPDATES


def test_what_fails_in_one_rank_is_in_the_log_of_rank_0(learners: Learners) -> None:
    learners.start("fails", 2, ["a", "a"])
    (code, said), (other_code, other_said) = learners.ends()
    assert (code, other_code) == (1, 1)
    log = (learners.folder / "a" / "run" / "out.log").read_text()
    assert "another learner has ended. rank 1: " in said and "its environment broke" in said
    assert 'raise RuntimeError("its environment broke")' in log, "the traceback of the other rank"
    assert "polybeast_learner: rank 1: batches: " in other_said and "out.log" not in other_said
    assert learners.checkpoint("a")["scheduler_state_dict"]["version"] == UPDATES


@pytest.mark.long
def test_what_is_not_finite_in_one_rank_ends_all_with_the_same_failure(learners: Learners) -> None:
    learners.start("nan", 2, ["a", "a"])
    weights = [learners.event(rank, "weights")["weights"] for rank in range(2)]
    assert weights[0] == weights[1]
    for code, said in learners.ends():
        assert code == 1 and "pg_loss is nan in optimiser step 4. The weights were not" in said
    kept = checkpoints.load(learners.folder / "a" / "run" / "last_good.tar")
    assert kept["scheduler_state_dict"]["version"] == UPDATES


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_in_order(learners: Learners, rank: int) -> None:
    learners.start("waits", 2, ["a", "a"])
    for each in range(2):
        learners.event(each, "waits")
    learners.running[rank].send_signal(signal.SIGTERM)
    found = [learners.event(each, "weights")["weights"] for each in range(2)]
    assert [code for code, _ in learners.ends()] == [0, 0]
    assert found[0] == found[1]
    assert learners.checkpoint("a")["scheduler_state_dict"]["version"] == UPDATES


@pytest.mark.long
def test_a_silent_rank_is_lost_after_the_time_limit(learners: Learners) -> None:
    learners.start("silent", 2, ["a", "a"])
    for each in range(2):
        learners.event(each, "waits")
    stopped = time.monotonic()
    learners.running[1].send_signal(signal.SIGSTOP)
    learners.event(0, "weights")
    assert time.monotonic() - stopped < 3.0 + NOTICED_S
    learners.running[1].kill()
    code, said = learners.ends()[0]
    assert code == 1 and "another learner has not answered for 3 s" in said
    assert "gloo" not in said and ".cc" not in said
    assert learners.checkpoint("a")["scheduler_state_dict"]["version"] == UPDATES


@pytest.mark.long
def test_callbacks_may_take_longer_than_the_time_limit_of_a_silent_rank(learners: Learners) -> None:
    learners.start("slow", 2, ["a", "a"], "--callback", "one_replica:Slow")
    learners.event(0, "weights")
    assert [code for code, _ in learners.ends()] == [0, 0]
    assert learners.checkpoint("a")["scheduler_state_dict"]["version"] == UPDATES


@pytest.mark.long
def test_a_checkpoint_may_take_longer_than_the_time_limit_of_a_silent_rank(
    learners: Learners,
) -> None:
    learners.start("slow_disk", 2, ["a", "a"])
    learners.event(0, "weights")
    assert [code for code, _ in learners.ends()] == [0, 0]
    assert learners.checkpoint("a")["scheduler_state_dict"]["version"] == UPDATES


def test_ranks_that_do_not_meet_end_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves the meeting, and rank 1 never comes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankGone, match="did not meet within 1 s"):
        store_of_torchrun(timeout_s=1.0)


def test_ranks_that_are_started_again_find_nothing_of_the_start_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps its store when it starts the ranks again; they would connect to the addresses
    of those that are gone, and find the reasons why these ended.
    """
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(store, 0, 1)]))
    for _ in range(2):
        found = store_of_torchrun(timeout_s=1.0)
        assert not found.check(["address"])
        found.set("address", "of this start")


class Broadcast:
    """Ranks that keep what rank 0 sends, which must first tell those that wait in `told`."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.run: dict[str, Any] = {}

    def tell(self, name: str, message: str) -> None:
        self.run = json.loads(message)

    def broadcast(self, data: bytes) -> bytes:
        assert self.run, "the others wait for it no longer than SILENT_S"
        self.sent.append(data)
        return data


class Received:
    """Ranks that receive what rank 0 has sent."""

    def __init__(self, leader: Broadcast) -> None:
        self._run, self._sent = leader.run, iter(leader.sent)

    def told(self, name: str, pause: object) -> str:
        return json.dumps(self._run)

    def broadcast(self, data: bytes) -> bytes:
        return next(self._sent)


def test_the_newest_checkpoint_that_is_not_damaged_is_sent_to_the_others(tmp_path: Path) -> None:
    good = {key: {} for key in checkpoints.KEYS}
    run = RunConfig(savedir=str(tmp_path), xpid="a", seed=3)
    run.folder.mkdir()
    (run.folder / "model.tar").write_bytes(b"half of a che")
    checkpoints.save(run.folder / "model.1.tar", good)
    ranks: Any = Broadcast()
    asked = MonoBeastFlags(run=run)
    with Replica(Launch(0, 2, 0, 2), ranks).flags([], lambda words: asked) as flags:
        assert flags == asked
    assert ranks.run == {"xpid": "a", "seed": 3}
    assert ranks.sent == [(run.folder / "model.1.tar").read_bytes(), b"", b""]


def test_without_a_checkpoint_all_ranks_have_the_settings_in_meta_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be resolved settings, which the same command does not name."""
    (tmp_path / "a").mkdir()
    meta = {"args": {"reward_clipping": "none", "unroll_length": 7, "seed": 3}}
    (tmp_path / "a" / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "a" / "logs.csv").write_text("# _tick,_time,step\n0,0,20\n")
    parsed = functools.partial(parse, MonoBeastFlags, "monobeast")
    words, sender = ["--xpid", "a", "--savedir", str(tmp_path)], Broadcast()
    leading: Any = sender
    with Replica(Launch(0, 2, 0, 2), leading).flags(words, parsed) as flags:
        first = flatten(flags)
    assert capsys.readouterr().out.count("starting again from step 0") == 1
    following: Any = Received(sender)
    with Replica(Launch(1, 2, 1, 2), following).flags(words, parsed) as flags:
        assert flatten(flags) == first | {"savedir": flags.run.savedir}
    assert first["reward_clipping"] == "none" and first["unroll_length"] == 7
    assert first["seed"] == 3


def test_an_error_of_another_rank_is_of_its_kind_and_names_the_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> int:
        with _named(2):
            raise error

    torn = checkpoints.Damaged(Path("model.tar"), "it is empty")
    for error, code in ((torn, 2), (RunError("the door is gone"), 1)):
        sentence = str(error)
        assert exit_code_of("polybeast_learner", functools.partial(fail, error)) == code
        assert capsys.readouterr().err == f"polybeast_learner: rank 2: {sentence}\n"


class Places(Broadcast):
    """Ranks at given places."""

    def __init__(self, *places: tuple[str, str]) -> None:
        super().__init__()
        self._places = places
        self.device = torch.device("meta")

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"host": host, "device": device} for host, device in self._places]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (("a", "cuda:1"), "cuda:0"),
        (("b", "cuda:0"), "cuda:0"),
        (("a", "cuda:0"), "cpu"),
        (("b", "cpu"), "cpu"),
    ],
)
def test_gradients_are_added_on_gpus_if_each_rank_has_one_of_its_own(
    second: tuple[str, str], expected: str
) -> None:
    ranks: Any = Places(("a", "cuda:0"), second)
    Replica(Launch(0, 2, 0, 2), ranks).add_where(torch.device("cuda:0"))
    assert ranks.device == torch.device(expected)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        (4, "auto", "cuda:1"),
        (4, "cuda", "cuda:1"),
        (0, "auto", "auto"),
        (1, "cuda:0", "cuda:0"),
        (1, "cpu", "cpu"),
    ],
)
def test_a_rank_has_the_gpu_with_its_number_on_its_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, expected: str
) -> None:
    with_gpus(monkeypatch, gpus)
    assert plan_of_rank(HardwareConfig(device=asked)).learner.hardware.device == expected


def test_more_ranks_than_gpus_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 1)
    with pytest.raises(UsageError, match="2 learners on this machine need a GPU each, .* are 1:"):
        plan_of_rank(HardwareConfig())
    off = HardwareConfig(disable_cuda=True)
    assert plan_of_rank(off).learner.hardware.device == "auto"


def plan_of_rank(hardware: HardwareConfig) -> Plan:
    """Returns the plan of rank 3 of 4 learners, the second one on its machine."""
    ranks: Any = None
    plan = plan_of(MonoBeastFlags(hardware=hardware), ListSource)
    return Replica(Launch(3, 4, 1, 2), ranks).share_of(plan)


def test_a_rank_learns_from_its_part_and_writes_nothing() -> None:
    plan = plan_of_rank(HardwareConfig())
    assert plan.learner.rollouts.batch_size == RolloutConfig.batch_size // 4
    assert plan.learner.hardware.num_learner_threads == 1
    assert plan.checkpoints.disable_checkpoint and not plan.becomes_latest
    assert not plan.loggers and plan.display.suppress_logs
    assert plan.recorded["batch_size"] == RolloutConfig.batch_size


class Told:
    """Ranks of which the second one has other settings."""

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [message, {"settings": {**message["settings"], "unroll_length": 7}}]


def test_learners_with_other_flags_are_refused_with_both() -> None:
    ranks: Any = Told()
    among = Replica(Launch(0, 2, 0, 2), ranks)
    sentence = "--unroll_length is 5 in rank 0 and 7 in rank 1"
    with pytest.raises(UsageError, match=sentence):
        among.check_same(MonoBeastFlags(rollouts=RolloutConfig(unroll_length=5)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rollouts": RolloutConfig(batch_size=9)}, "batch_size 9 .* use a multiple of 2"),
        ({"replay": ReplayConfig(replay_size=999)}, "replay_size 999 works with one learner"),
        ({"hardware": HardwareConfig(num_learner_threads=2)}, "num_learner_threads 2 works with"),
    ],
)
def test_what_several_learners_cannot_do_is_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    ranks: Any = None
    usual: dict[str, Any] = {
        "rollouts": RolloutConfig(),
        "replay": ReplayConfig(),
        "hardware": HardwareConfig(),
    }
    with pytest.raises(UsageError, match=sentence):
        Replica(Launch(0, 2, 0, 2), ranks).check_can_share(**usual | settings)


class Waits:
    """Ranks that note how long they would wait for a message."""

    def told(
        self, name: str, pause: object, timeout_s: float = 1800.0, before: str | None = None
    ) -> str:
        self.timeout_s = timeout_s
        return ""


def test_callbacks_of_rank_0_may_take_any_time() -> None:
    ranks: Any = Waits()
    Replica(Launch(1, 2, 1, 2), ranks).meet(2, lambda: False)
    assert ranks.timeout_s == math.inf
