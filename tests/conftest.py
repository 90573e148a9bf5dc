# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: few threads, a time limit, and no access to folders of the user."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
import warm

from torchbeast.fleets import child_process

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "--gpu" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of this process and of programs that it starts

_HANGS_AFTER_S = 240.0
_TESTS = Path(__file__).parent
# Folders of tests that take the longest, each a second or more.
_LONGEST = [_TESTS, *(_TESTS / name for name in ("integration", "on_ray", "sweep"))]


def _is_there(module: str) -> bool:
    """Returns whether a module is installed; folders of tests have the same names as packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Without the compiled part, as MonoBeast may be installed, its tests are left out.
collect_ignore = [] if _is_there("libtorchbeast._C") else ["libtorchbeast", "golden", "nest"]
if collect_ignore:
    collect_ignore += ["servers/test_poly_source.py", "servers/test_discovery.py"]
    collect_ignore += ["integration/test_python_env_server.py", "learner/test_central_inference.py"]


def pytest_configure() -> None:
    """Lets tests hear SIGHUP and SIGINT where nohup, or a shell's &, has all programs ignore them.

    A handler is not inherited by a program that is started, an ignored signal is; with a handler
    of its own the session survives a lost terminal as before.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of this project's tests."""
    parser.addoption(
        "--gpu", action="store_true", help="do not hide the GPU; for tests that use it"
    )
    parser.addoption(
        "--attack-seconds", type=float, default=1.0, help="how long strangers attack a game"
    )
    parser.addoption("--no-skips", action="store_true", help="let tests fail that would be skipped")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest tests: at the end one of them would run while other cores wait."""
    items.sort(key=lambda item: item.path.parent not in _LONGEST)


def pytest_collection_finish() -> None:
    """Has the collector leave out torch and thousands of tests, which take it half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure, with its reason, where the option asks for that."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"it would be skipped: {report.longreprtext}"
    return report


@pytest.fixture(autouse=True, scope="session")
def warm_children() -> Iterator[None]:
    """Starts the children of sources and fleets that a test makes in its own process faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", warm)
        yield


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Ends the session with the stack of every thread if a test hangs."""
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a folder for the sockets of a test, with a name short enough for them."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Undoes what a program that ran in this process did to the logger of TorchBeast.

    A logger that does not propagate is given the handler of `caplog` itself, so that
    a later test would see each of its records twice.
    """
    logger = logging.getLogger("torchbeast")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Undoes what a program that ran in this process did to the number of torch's threads, on which
    the last bits of sums depend.
    """
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
