# SPDX-License-Identifier: Apache-2.0
"""The replay of a run: what its memory takes, which algorithms may have one, how it is saved."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
from test_learner_run import GOOD, train_with

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.replay.rollout_replay import RolloutReplay
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.errors import UsageError
from torchbeast.fleets.system import in_bytes
from torchbeast.run import replay as learning_replay
from torchbeast.run.assemble import LearnerConfig
from torchbeast.run.checkpoint_writer import REPLAY as FILE
from torchbeast.run.checkpoint_writer import CheckpointNotWritten, CheckpointWriter
from torchbeast.run.config import CheckpointConfig
from torchbeast.run.learner_run import check_learns_from_replay
from torchbeast.run.replay import make_replay, resume_replay

T, B = 10, 4
NEEDS = ("policy_logits",)
# An 8-byte observation; reward 4, done, truncated, episode_end 1 each, episode_step 4,
# episode_return 4, action 8, policy_logits 4 * 3, policy_version 8, the list of episodes 16.
STACKED, EACH = 4, 8 + 4 + 3 + 4 + 4 + 8 + 12 + 8
BUFFERS = 12_345_678  # bytes


def agent() -> Agent:
    return make_agent(
        ActorSpec("mlp"), ArraySpec((2,), "float32", low=-1, high=1), Discrete(3), STACKED
    )


def config(*words: str) -> LearnerConfig:
    usual = ["--batch_size", str(B), "--unroll_length", str(T), "--xpid", "x"]
    return parse(MonoBeastFlags, "monobeast", [*usual, *words]).learner_config("Catch")


def made(size: int = 1000, free: int | None = None) -> RolloutReplay:
    settings = config("--replay_size", str(size))
    replay: RolloutReplay = make_replay(settings, RolloutSpec(agent(), NEEDS, T), 1, BUFFERS, free)
    return replay


# --- memory


def test_the_start_says_what_the_memory_takes(capsys: pytest.CaptureFixture[str]) -> None:
    replay = made(10**7, free=2 * 10**9)
    assert replay.capacity == 10**7 and replay.frame_stack == STACKED
    assert capsys.readouterr().out == (
        f"Replay buffer: 10,000,000 steps of {EACH} bytes, 0.5 GB when full. "
        "Other buffers: 12.3 MB. Free memory: 2.0 GB.\n"
    )
    made(1000)
    assert capsys.readouterr().out.endswith("Other buffers: 12.3 MB.\n"), (
        "nobody knows what is free"
    )


def test_what_does_not_fit_is_refused_and_what_would_is_told() -> None:
    free = 20_000_000
    most = (9 * free // 10 - BUFFERS) // EACH
    made(most, free)
    with pytest.raises(UsageError) as error:
        made(most + 1, free)
    assert str(error.value) == (
        f"replay_size {most + 1} needs 5.7 MB of memory, {EACH} bytes a step, and 12.3 MB for "
        f"other buffers, but 20.0 MB are free on this machine: use at most replay_size {most}"
    )


def test_memory_that_cannot_be_reserved_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("it cannot be reserved")

    monkeypatch.setattr("torchbeast.run.replay.RolloutReplay", refuse)
    with pytest.raises(UsageError, match="it cannot be reserved: use a smaller replay_size"):
        made()


@pytest.mark.parametrize(
    ("count", "words"), [(7.13e9, "7.1 GB"), (1e8, "0.1 GB"), (2.34e6, "2.3 MB")]
)
def test_numbers_of_bytes_are_short(count: float, words: str) -> None:
    assert in_bytes(count) == words


# --- algorithms


def test_an_algorithm_that_takes_replayed_columns_for_new_ones_is_refused() -> None:
    given = config("--replay_size", "1000", "--algo", "impala")
    with pytest.raises(UsageError, match="algo impala does not use a replay.*laser"):
        check_learns_from_replay(given, "impala")
    check_learns_from_replay(config("--replay_size", "1000"), "laser")
    check_learns_from_replay(config(), "impala")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--burn_in", "10"], "burn_in 10 leaves no step .* unroll_length 10"),
        (["--replay_ratio", "0", "--burn_in", "60"], "burn_in 60 leaves no step"),
        (
            ["--burn_in", "9", "--replay_service", "/a"],
            "algo r2d2 cannot share a replay.*remove replay_service",
        ),
    ],
)
def test_a_burn_in_needs_shorter_time_than_rollouts_and_states_of_the_own_network(
    words: list[str], error: str
) -> None:
    with pytest.raises(UsageError, match=error):
        check_learns_from_replay(config("--algo", "r2d2", *words), "r2d2")


def test_laser_without_a_replay_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    check_learns_from_replay(config("--algo", "laser"), "laser")
    assert "Set replay_size" in capsys.readouterr().out


# --- files


def test_a_resumed_run_begins_with_the_saved_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / FILE, "wb") as file:
        made().save(file)
    replay = Mock(wraps=made())
    replay.size = 0
    capsys.readouterr()
    resume_replay(replay, tmp_path, is_saved=True)
    said = capsys.readouterr().out
    assert said == f"The replay continues with the 0 steps in {tmp_path / FILE}.\n"
    called = [name for name, _, _ in replay.method_calls]
    assert called == ["load", "new_source"]


def test_no_part_of_a_run_repeats_the_draws_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that is not saved begins with random numbers of its own."""
    seeds: list[int] = []

    def noting(config: LearnerConfig, rollouts: RolloutSpec, seed: int, *_: Any) -> Any:
        seeds.append(seed)
        return made()

    monkeypatch.setattr(learning_replay, "make_replay", noting)
    monkeypatch.setattr(learning_replay, "mixed_source", lambda online, *_: online)
    for folder in ("one", "one", "another"):
        words = ["--savedir", str(tmp_path / folder), "--xpid", "run", "--seed", "1"]
        flags = parse(MonoBeastFlags, "monobeast", [*words, "--replay_size", "1000"])
        train_with(flags, "Catch", GOOD)
    first, resumed, again = seeds
    assert resumed != first == again


@pytest.mark.parametrize("is_saved", [False, True])
def test_otherwise_it_begins_with_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_saved: bool
) -> None:
    """Also where the file is there, but is not kept up to date any more."""
    if not is_saved:
        (tmp_path / FILE).write_bytes(b"old")
    resume_replay(made(), tmp_path, is_saved)
    (said,) = capsys.readouterr().out.splitlines()[-1:]
    why = f"there is no {tmp_path / FILE} yet" if is_saved else "checkpoint_replay would save it"
    assert said == f"The replay starts empty: {why}."


def test_a_damaged_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(UsageError, match=f"{FILE}: .* the file ends too early; move it away"):
        resume_replay(made(), tmp_path, is_saved=True)


def replay_of(**attributes: Any) -> Any:
    return Mock(lock=Lock(), **attributes)


def writer(folder: Path, save: Any, disabled: bool = False) -> CheckpointWriter:
    config = CheckpointConfig(disable_checkpoint=disabled)
    replay = replay_of(inserted=0, save=save)
    return CheckpointWriter(Mock(checkpoint=folder / "model.tar"), {}, config, replay)


def checkpoint() -> dict[str, Any]:
    return {"step": 1}


def test_the_replay_is_written_beside_the_checkpoint_and_as_a_whole(tmp_path: Path) -> None:
    def save(file: BinaryIO) -> None:
        assert (tmp_path / "model.tar").exists() and not (tmp_path / FILE).exists()
        file.write(b"first half, ")
        assert not (tmp_path / FILE).exists(), "nobody reads half of it"
        file.write(b"second half")

    writer(tmp_path, save).save(checkpoint)
    assert (tmp_path / FILE).read_bytes() == b"first half, second half"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.tar", FILE]


def test_a_replay_into_which_nothing_was_inserted_is_not_written_again(tmp_path: Path) -> None:
    replay = replay_of(inserted=40)
    kept = CheckpointWriter(Mock(checkpoint=tmp_path / "model.tar"), {}, CheckpointConfig(), replay)
    for inserted, written in ((40, 1), (40, 1), (80, 2)):
        replay.inserted = inserted
        kept.save(checkpoint)
        assert replay.save.call_count == written


def test_a_replay_that_was_not_written_is_written_by_the_next_save(tmp_path: Path) -> None:
    replay = replay_of(inserted=40, save=Mock(side_effect=[OSError(28, "full"), None]))
    kept = CheckpointWriter(Mock(checkpoint=tmp_path / "model.tar"), {}, CheckpointConfig(), replay)
    with pytest.raises(
        CheckpointNotWritten, match=r"replay.bin \(full\); there is none yet: free some space"
    ):
        kept.save(checkpoint)
    kept.save(checkpoint)
    assert replay.save.call_count == 2


def test_a_full_disk_keeps_the_replay_before_it(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"new")
        raise OSError(28, "No space left on device")

    (tmp_path / FILE).write_bytes(b"old")
    with pytest.raises(CheckpointNotWritten) as error:
        writer(tmp_path, fail).save(checkpoint)
    assert str(error.value).startswith(
        f"the checkpoint {tmp_path / 'model.tar'} is new, but no replay was written to "
        f"{tmp_path / FILE} (No space left on device); an earlier one is intact: "
        "free some space there"
    )
    assert (tmp_path / FILE).read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.tar", FILE]


def test_without_checkpoints_no_replay_is_saved(tmp_path: Path) -> None:
    writer(tmp_path, Mock(), disabled=True).save(checkpoint)
    assert list(tmp_path.iterdir()) == []
