# SPDX-License-Identifier: Apache-2.0
"""A program that fails ends with an exit code and one sentence, without our own frames."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import traceback
import types
from pathlib import Path

import pytest

import torchbeast
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.errors import (
    RunError,
    UsageError,
    exit_code_of,
    naming_limit,
    readable,
    refusing_paths,
    without_our_frames,
)


def fail() -> None:
    raise KeyError("the joystick is gone")


def test_a_terminal_obeys_no_text_of_others_and_colours_leave_no_trace() -> None:
    assert readable("\x1b[36mray::A\x1b[39m \x1b[2J\r") == "ray::A ?[2J?"


def formatted(error: BaseException) -> str:
    return "address: " + "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("no"), 2), (RunError("no"), 1), (KeyboardInterrupt(), 130)]
)
def test_each_kind_of_error_has_its_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> int:
        raise error

    assert exit_code_of("polybeast", body) == code
    assert capsys.readouterr().err.startswith("polybeast: ")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    ],
)
def test_where_no_more_threads_may_start_the_limit_to_raise_is_named(error: Exception) -> None:
    with pytest.raises(RunError, match=r"no thread .* \(ulimit -u, or pids.max of a container\)"):
        with naming_limit("thread"):
            raise error


def test_a_package_that_is_not_installed_is_named_with_the_remedy() -> None:
    """Without site-packages, as with another Python in the folder of a clone."""
    env = os.environ | {"PYTHONPATH": str(Path(torchbeast.__file__).parents[1])}
    words = [sys.executable, "-S", "-m", "torchbeast.status"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    expected = (
        rf"status: {sys.executable} has no package \w+: .*{sys.executable} -m pip install .*\n"
    )
    assert re.fullmatch(expected, done.stderr) and done.returncode == 2


def test_a_package_behind_a_link_is_ours_too(tmp_path: Path) -> None:
    """A home folder may be a link."""
    link = tmp_path / "a link"
    link.symlink_to(Path(torchbeast.__file__).parents[1])
    env, words = os.environ | {"PYTHONPATH": str(link)}, [sys.executable, "-S", "-m"]
    done = subprocess.run(
        [*words, "torchbeast.status"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.endswith(f" -m pip install {shlex.quote(str(link))}\n")


def test_what_stdout_cannot_encode_is_escaped() -> None:
    code = (
        "from torchbeast.errors import exit_code_of\n"
        "raise SystemExit(exit_code_of('status', lambda: print('gr\\xf6\\xdfe') or 0))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(torchbeast.__file__).parents[1])}
    env |= {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "gr\\xf6\\xdfe\n")


def test_a_script_whose_last_word_is_m_may_import_the_package(tmp_path: Path) -> None:
    """It is Hydra's switch for several runs."""
    (tmp_path / "script.py").write_text("import torchbeast\n")
    env = os.environ | {"PYTHONPATH": str(Path(torchbeast.__file__).parents[1])}
    words = [sys.executable, str(tmp_path / "script.py"), "-m"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "program",
    [
        *("monobeast", "polybeast", "polybeast_env", "polybeast_learner", "raybeast", "sweep"),
        *("suite", "bench", "compare", "export", "keys", "plot", "status"),
    ],
)
def test_ctrl_c_during_the_imports_of_a_program_is_no_traceback(
    program: str, tmp_path: Path
) -> None:
    """All of them import tyro. A library may also catch a KeyboardInterrupt, as this one does."""
    (tmp_path / "tyro.py").write_text(
        "import time\nprint('importing', flush=True)\n"
        "try:\n    while True: time.sleep(0.01)\n"
        "except KeyboardInterrupt: print('caught', flush=True)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(torchbeast.__file__).parents[1])])
    words, pipe = [sys.executable, "-m", f"torchbeast.{program}"], subprocess.PIPE
    env = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, env=env, text=True) as started:
        assert started.stdout is not None and started.stdout.readline() == "importing\n"
        started.send_signal(signal.SIGINT)
        said, error = started.communicate(timeout=60)
    assert (started.returncode, said, error) == (130, "", f"{program}: interrupted.\n")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space there, or use another --savedir"),
        (errno.EDQUOT, "free some space there, or use another --savedir"),
        (errno.ENOENT, "use another --savedir"),
    ],
)
def test_only_for_a_full_disk_the_remedy_is_room(number: int, remedy: str) -> None:
    said = f"/runs cannot be used ({os.strerror(number)}): {remedy}"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        with refusing_paths("use another --savedir", "/runs"):
            raise OSError(number, os.strerror(number))


def test_a_missing_compiled_module_is_reported_with_an_alternative(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body() -> int:
        raise ModuleNotFoundError("No module named 'libtorchbeast'", name="libtorchbeast")

    assert exit_code_of("polybeast", body) == 2
    said = capsys.readouterr().err
    assert "libtorchbeast" in said and "MonoBeast" in said


def test_polybeast_learner_reports_a_missing_compiled_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torchbeast.polybeast_learner", "torchbeast.servers.discovery"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "libtorchbeast", None)
    assert importlib.import_module("torchbeast.polybeast_learner").main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "libtorchbeast" in said and "MonoBeast" in said


def test_a_compiled_module_that_cannot_be_loaded_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without gRPC's library, on another node of a cluster, or after an upgrade."""
    for name in ("torchbeast.polybeast_learner", "torchbeast.servers.discovery", "libtorchbeast"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "libtorchbeast._C", types.ModuleType("_C"))
    assert importlib.import_module("torchbeast.polybeast_learner").main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be loaded here" in said


def test_another_missing_module_keeps_its_traceback() -> None:
    def body() -> int:
        raise ModuleNotFoundError("No module named 'math'", name="math")

    with pytest.raises(ModuleNotFoundError):
        exit_code_of("polybeast", body)


def test_the_users_own_frames_are_shown() -> None:
    with pytest.raises(KeyError) as raised:
        fail()
    shown = without_our_frames(formatted(raised.value))
    assert "Traceback" in shown and Path(__file__).name in shown
    assert shown.endswith("KeyError: 'the joystick is gone'\n")


def test_our_own_frames_are_removed() -> None:
    with pytest.raises(KeyError) as raised:
        SyncVecEnv([fail], "Mine")  # type: ignore[list-item]
    text = formatted(raised.value)
    shown = without_our_frames(text)
    assert "core/envs/sync_vec_env.py" in text and "core/envs/sync_vec_env.py" not in shown
    assert 'raise KeyError("the joystick is gone")' in shown


def test_a_traceback_of_our_own_code_alone_becomes_its_last_line() -> None:
    message = (
        "address: Traceback (most recent call last):\n"
        f'  File "{Path(without_our_frames.__code__.co_filename)}", line 3, in step\n'
        "    raise ValueError\n"
        "    ^^^^^^^^^^^^^^^^\n"
        "ValueError: expected a finite reward, got nan\n"
    )
    assert without_our_frames(message) == "address: ValueError: expected a finite reward, got nan\n"


def test_a_terminal_obeys_nothing_that_an_error_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    """A stranger's checkpoint, or a host, may name things like this."""

    def body() -> int:
        raise UsageError("no \x1b[2J\x9b1m model\n\tat all")

    assert exit_code_of("export", body) == 2
    assert capsys.readouterr().err == "export: no ?[2J?1m model\n\tat all\n"
