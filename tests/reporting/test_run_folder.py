# SPDX-License-Identifier: Apache-2.0
"""The folder of a run records what ran, without secrets."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from background import a_fork

from torchbeast import zoo
from torchbeast.errors import RunError, UsageError
from torchbeast.reporting import run_folder
from torchbeast.reporting.log_files import AppendedFile
from torchbeast.reporting.output import Lock
from torchbeast.reporting.run_folder import (
    RunConfig,
    RunFolder,
    is_in_use,
    read_meta,
    run_path,
    session,
    warning_handler,
    write_atomically,
)
from torchbeast.sweep.config import SweepConfig


def meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def test_meta_json_has_flags_dates_and_success(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", {"env": "Catch"}, ["polybeast", "--env", "Catch"])
    before = meta(run.path)
    run.finish(successful=True)
    after = meta(run.path)
    assert before["successful"] is False and before["date_end"] is None
    assert after["successful"] is True and after["date_end"] >= after["date_start"]
    assert after["args"] == {"env": "Catch"} and after["argv"][0] == "polybeast"


def test_a_command_that_trains_nothing_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "a", {"rate": 0.1}, ["monobeast"])
    first.begin({"rate": 0.1, "seed": 7}, 0)
    first.finish(successful=True)
    before = (first.path / "meta.json").read_bytes()
    idle = RunFolder(tmp_path / "a", {"rate": 0.2}, ["monobeast", "--rate", "0.2"])
    assert (first.path / "meta.json").read_bytes() == before, "it may have nothing to train"
    idle.finish(successful=False)
    assert (first.path / "meta.json").read_bytes() == before


def test_a_run_that_was_killed_after_its_last_checkpoint_is_found_to_be_complete(
    tmp_path: Path,
) -> None:
    killed = RunFolder(tmp_path / "a", {})
    killed.begin({"rate": 0.1}, 0)
    killed.finish(successful=False)
    RunFolder(tmp_path / "a", {"rate": 0.2}).finish(successful=True)
    found = meta(tmp_path / "a")
    assert found["successful"] and found["args"] == {"rate": 0.1}


def test_a_run_keeps_the_record_of_every_part_whose_training_it_has(tmp_path: Path) -> None:
    def part(rate: float, step: int, changed: dict[str, list[float]]) -> None:
        run = RunFolder(tmp_path / "a", {}, ["monobeast", f"--rate={rate}"])
        run.begin({"rate": rate}, step, changed)
        run.finish(successful=True)

    part(0.1, 0, {})
    part(0.2, 100, {"rate": [0.1, 0.2]})
    part(0.3, 200, {"rate": [0.2, 0.3]})  # killed before its first checkpoint
    part(0.4, 200, {"rate": [0.2, 0.4]})
    found = meta(tmp_path / "a")
    first, second = found["earlier_parts"]
    assert found["args"] == {"rate": 0.4} and found["changed"] == {"rate": [0.2, 0.4]}
    assert (first["step"], second["step"], found["step"]) == (0, 100, 200)
    assert (first["argv"][1], second["argv"][1]) == ("--rate=0.1", "--rate=0.2")
    assert second["changed"] == {"rate": [0.1, 0.2]} and first["date_end"] >= first["date_start"]
    part(0.5, 0, {})
    assert meta(tmp_path / "a")["earlier_parts"] == [], "it has started over"


def test_a_record_of_an_earlier_version_is_the_first_part(tmp_path: Path) -> None:
    old = {"args": {"rate": 0.1}, "argv": ["polybeast"], "successful": True}
    (tmp_path / "meta.json").write_text(json.dumps(old))
    run = RunFolder(tmp_path, {}, ["monobeast"])
    run.begin({"rate": 0.1}, 100)
    run.finish(successful=True)
    assert meta(tmp_path)["earlier_parts"] == [{"argv": ["polybeast"], "successful": True}]


def test_of_environment_variables_only_those_that_name_a_job_of_slurm_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("SLURM_JWT", "hunter2")  # of `scontrol token`, for who asks Slurm by REST
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run = RunFolder(tmp_path / "a", {})
    run.finish(successful=False)
    text = "".join(p.read_text() for p in run.path.iterdir())
    assert "hunter2" not in text and "MY_SECRET_TOKEN" not in text
    assert meta(run.path)["slurm"] == {"SLURM_JOB_ID": "17"}


def test_a_name_alone_is_a_run_of_the_usual_folder_unless_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, here = tmp_path / "usual", tmp_path / "here"
    monkeypatch.setattr(RunConfig, "savedir", str(usual))
    (usual / "pong-1").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    assert run_path("pong-1") == usual / "pong-1"
    assert run_path("pong-2") == usual / "pong-2"
    Path("pong-1").mkdir()
    assert run_path("pong-1") == Path("pong-1")


@pytest.mark.parametrize("folder", ["", "~/logs/"])
@pytest.mark.parametrize("file", ["", "/model.tar"])
def test_zoo_and_a_name_are_a_trained_agent_wherever_a_run_is_named(folder: str, file: str) -> None:
    assert run_path(f"{folder}zoo:cartpole-ppo{file}") == zoo.AGENTS / "cartpole-ppo.pt"
    assert run_path(f"{folder}zoo:CartPole-PPO{file}") == zoo.AGENTS / "cartpole-ppo.pt"
    assert run_path(f"{folder}not-zoo:cartpole-ppo").name == "not-zoo:cartpole-ppo"


def test_another_file_of_a_trained_agent_is_refused() -> None:
    with pytest.raises(
        UsageError, match="zoo:cartpole-ppo has only one checkpoint: remove model.1"
    ):
        run_path("logs/zoo:cartpole-ppo/model.1.tar")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cartpole-pp", "no agent zoo:cartpole-pp: --preset help .*; did you mean cartpole-ppo"),
        ("../zoo/agents/cartpole-ppo", "no agent zoo:"),
        ("catch", "no trained agent of the preset catch-impala .*--preset catch-impala$"),
    ],
)
def test_an_agent_that_there_is_not_is_refused_with_what_to_do(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "AGENTS", tmp_path)
    with pytest.raises(UsageError, match=message):
        zoo.agent_path(name)


def test_latest_points_at_the_run_that_was_the_last_to_learn(tmp_path: Path) -> None:
    runs = [RunFolder(tmp_path / name, {}) for name in ("a", "b", "c")]
    assert not (tmp_path / "latest").exists()
    for run in (runs[0], runs[2]):
        run.become_latest()
        assert run_path(tmp_path / "latest") == run.path
        assert run_path(tmp_path / "latest" / "model.tar") == run.path / "model.tar"
    for run in runs:
        run.finish(successful=True)


def test_a_link_to_the_folder_of_an_earlier_version_still_leads_to_its_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", {})
    (tmp_path / "latest").symlink_to("a")
    assert run_path(tmp_path / "latest").resolve() == run.path
    run.become_latest()
    assert run_path(tmp_path / "latest") == run.path and not (tmp_path / "latest").is_dir()
    run.finish(successful=True)


def test_a_real_folder_named_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    run = RunFolder(tmp_path / "a", {})
    run.become_latest()
    run.finish(successful=True)
    assert (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()


@pytest.mark.parametrize("kept", [None, "an earlier run", "a file of the run"])
def test_only_a_new_folder_with_nothing_else_in_it_is_discarded(
    kept: str | None, tmp_path: Path
) -> None:
    if kept == "an earlier run":
        (tmp_path / "a").mkdir()
    run = RunFolder(tmp_path / "a", {})
    if kept == "a file of the run":
        (run.path / "logs.csv").write_text("")
    before = {path.name for path in run.path.iterdir()}
    run.finish(successful=False)
    run.discard()
    assert run.path.exists() == (kept is not None)
    assert kept is None or {path.name for path in run.path.iterdir()} == before


def test_out_log_has_log_messages_until_the_end_of_the_run(tmp_path: Path) -> None:
    log = logging.getLogger("torchbeast.some_part")
    run = RunFolder(tmp_path / "a", {})
    log.info("in time")
    run.finish(successful=True)
    log.info("too late")
    text = (run.path / "out.log").read_text()
    assert "in time" in text and "too late" not in text


def test_a_second_run_of_the_same_name_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", {})
    with pytest.raises(RunError, match="another process"):
        RunFolder(tmp_path / "a", {})
    run.finish(successful=True)
    RunFolder(tmp_path / "a", {}).finish(successful=True)


def test_runs_and_sweeps_without_a_name_never_share_a_folder_within_a_second_and_a_process_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20190101-000000")  # and a container's pid is 1
    folders = [RunConfig().folder for _ in range(8)]
    folders += [SweepConfig(set=("seed=1",)).folder() for _ in range(8)]
    assert len({*folders}) == 16


def test_a_fork_of_the_caller_does_not_keep_the_folder_locked(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", {})
    with a_fork():
        assert is_in_use(tmp_path / "a"), "the fork did not unlock it"
        run.finish(successful=True)
        RunFolder(tmp_path / "a", {}).finish(successful=True)


def test_a_run_begins_while_another_process_looks_whether_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    looking = open(tmp_path / "a" / "out.log", "ab")  # noqa: SIM115
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_in_use` does for a moment
    monkeypatch.setattr(time, "sleep", lambda _: looking.close())
    RunFolder(tmp_path / "a", {}).finish(successful=True)
    assert looking.closed, "the run waited for it"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_run_begins_on_a_file_system_without_locks_and_says_that_it_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.tar.7.tmp").write_text("of another process, which may live")
    run = RunFolder(tmp_path / "a", {})
    assert (tmp_path / "a" / "model.tar.7.tmp").exists()
    rows = AppendedFile(tmp_path / "a" / "rows.csv")
    assert rows.lock() and not is_in_use(tmp_path / "a")
    rows.close()
    run.finish(successful=True)
    said = f"{run.path} cannot be locked here, because its file system does not support locks: once"
    assert f"Warning: {said}" in capsys.readouterr().err
    assert (run.path / "out.log").read_text().count(said) == 1


def test_without_locks_the_first_run_finds_out_that_a_second_one_uses_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "lock", lambda _: Lock.NONE)
    first = RunFolder(tmp_path / "a", {})
    first.check_is_ours()
    RunFolder(tmp_path / "a", {}).finish(successful=True)
    first.check_is_ours()  # because that one trained nothing
    second = RunFolder(tmp_path / "a", {})
    second.begin({"by": "second"}, 5)
    with pytest.raises(RunError, match="another process has started in .*/a, which cannot be"):
        first.check_is_ours()
    first.finish(successful=False)
    second.check_is_ours()
    assert read_meta(tmp_path / "a")["args"] == {"by": "second"}
    assert read_meta(tmp_path / "a")["date_end"] is None, "the first run has ended, not this one"
    second.finish(successful=True)
    second.discard()
    assert second.path.exists(), "the first run made it"


def test_a_new_folder_that_continues_another_run_has_no_earlier_part(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", {})
    run.begin({}, 500)
    run.finish(successful=True)
    assert read_meta(run.path)["earlier_parts"] == []


def test_a_record_that_cannot_be_read_at_present_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFolder(tmp_path / "a", {"of": "the run"}).finish(successful=True)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="another savedir"):
        patch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.ESTALE, "stale")))
        RunFolder(tmp_path / "a", {"of": "another"})
    assert read_meta(tmp_path / "a")["args"] == {"of": "the run"}


def test_a_folder_that_cannot_be_made_is_refused_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="use another savedir"):
        RunFolder(tmp_path / "file" / "a", {})


def test_a_failed_write_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.tar"
    write_atomically(path, b"old")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_writes_its_files_although_no_more_files_can_be_opened(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.open(os.devnull, os.O_RDONLY)
            for data in (b"1", b"2"):
                write_atomically(run.checkpoint, data)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert run.checkpoint.read_bytes() == b"2"
    run.finish(successful=True)


def test_a_signal_before_a_part_begins_does_not_make_the_failed_one_before_successful(
    tmp_path: Path,
) -> None:
    failed = RunFolder(tmp_path / "a", {})
    failed.begin({"rate": 0.1}, 0)
    failed.finish(successful=False)
    with session(tmp_path / "a", {}):
        signal.raise_signal(signal.SIGTERM)
        raise RunError("the run has ended")  # as `Supervisor.check_goes_on` does
    assert not meta(tmp_path / "a")["successful"]


def test_a_warning_is_shown_once_while_a_process_has_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = RunFolder(tmp_path / "a", {}), RunFolder(tmp_path / "b", {})
    logging.getLogger("torchbeast.actors").warning("a worker died")
    first.finish(successful=True)
    logging.getLogger("torchbeast.actors").warning("another one died")
    second.finish(successful=True)
    said = "Warning: a worker died\nWarning: another one died\n"
    assert capsys.readouterr().err == said


def test_a_thread_that_warns_while_the_last_run_ends_does_not_fail(tmp_path: Path) -> None:
    log = logging.getLogger("torchbeast")
    run = RunFolder(tmp_path / "a", {})
    shown = log.handlers[-1]
    run.finish(successful=True)
    record = log.makeRecord("torchbeast", logging.WARNING, "", 0, "late", (), None)
    assert not shown.filter(record)


def test_a_terminal_obeys_nothing_that_a_warning_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"levelno": logging.WARNING, "msg": "from \x1b[2J"})
    warning_handler().handle(record)
    assert capsys.readouterr().err == "Warning: from ?[2J\n"


def test_unfinished_copies_of_a_killed_run_are_removed_too(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    left, mine = folder / "000000000100.tar.123.tmp", folder / "mine.tmp"
    for path in (left, mine):
        path.touch()
    RunFolder(tmp_path / "run", {}, []).finish(successful=True)
    assert not left.exists() and mine.exists()


def test_users_code_that_exits_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no licence"), session(tmp_path / "a", {}):
        sys.exit("no licence")
    assert not meta(tmp_path / "a")["successful"]
