# SPDX-License-Identifier: Apache-2.0
"""The connection of a process to Ray.

It keeps Ray quiet, keeps it from starting a cluster on its own, and keeps the program's signal
handlers.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torchbeast.errors import RunError
from torchbeast.fleets.system import uninterrupted
from torchbeast.on_ray.config import CLIENT

_log = logging.getLogger("torchbeast.ray")

FULL = (
    "Ray's object store and the disk to which it spills are full: use {}, or start Ray "
    "with a larger --object-store-memory"
)
ENDED = (
    "{}: the program was killed, or a Ray process that it needs (raylet on this "
    "machine, gcs_server on the head). {}"
)
RESUME = "The last checkpoint of the run is kept, if there was one; the same --xpid resumes it."

_PROBE_S = 5.0  # time limit to reach the address of a cluster
_SUBMITTED_AS_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Ray reads these variables when it is imported or starts. Without them it would run workers at
# niceness 15, below everything else on the machine, and any call without a connection would start
# Ray.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@contextmanager
def prepared_environment() -> Iterator[None]:
    """Sets variables that Ray reads when it is imported, unless the user has set them. Enter it
    before importing Ray.

    At the end it restores the variables and the state of faulthandler, which Ray changes for the
    rest of the process.
    """
    before = {name: value for name, value in os.environ.items() if _is_rays(name)}
    handles_faults = faulthandler.is_enabled()
    os.environ.update({**_ENVIRONMENT, **before})
    try:
        yield
    finally:
        for name in filter(_is_rays, list(os.environ)):
            del os.environ[name]
        os.environ.update(before)
        if not handles_faults:
            faulthandler.disable()


def _is_rays(variable: str) -> bool:
    return variable.startswith("RAY_") or variable == "PYTHONBREAKPOINT"


def import_ray() -> Any:
    """Returns Ray's module; raises RunError if Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise RunError(
            f"Ray is not installed ({error}): pip install 'torchbeast[ray]'. MonoBeast and "
            "PolyBeast work without it"
        ) from error
    return ray


def connected_ray() -> Any | None:
    """Returns Ray's module if this process is already connected to Ray, else None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _check_reachable(address: str, said_in: str, start: str) -> None:
    """Raises RunError if nobody listens at HOST:PORT; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdecimal():  # auto, or another form that Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except OSError as error:
        raise RunError(
            f"there is no Ray cluster at {said_in} {address} ({error.strerror or error}): {start}"
        ) from error


@contextmanager
def connected(
    address: str, said_in: str, start: str, who: str, how_to_go_on: str = RESUME, **options: Any
) -> Iterator[Any]:
    """Connects to the cluster at an address for the block; "local" starts a cluster, and ends it.

    Yields Ray's module. said_in: where the user gave the address. start: what to do without a
    cluster. who, how_to_go_on: see `last_words`. options: of ray.init.

    Raises RunError without Ray or a cluster.
    """
    with prepared_environment(), last_words(who, how_to_go_on):
        ray = import_ray()
        _check_reachable(address, said_in, start)
        with _logged(ray):
            try:
                _initialise(ray, address, start, options)
                yield ray
            finally:
                end_with(ray.shutdown)


@contextmanager
def _logged(ray: Any) -> Iterator[None]:
    """Logs what Ray prints: a page about every lost worker, which the program reports in a line."""
    worker, log = ray._private.worker, logging.getLogger("ray")
    prints, level = worker.print_to_stdstream, log.level
    worker.print_to_stdstream = _log_what_ray_prints
    try:
        yield
    finally:
        worker.print_to_stdstream = prints
        log.setLevel(level)


def _initialise(ray: Any, address: str, start: str, options: Mapping[str, Any]) -> None:
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a program's does not
    try:
        # Nobody could end what has half started.
        with uninterrupted() if raises else nullcontext(), _signals_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises anything, ValueError and ConnectionError included
        if isinstance(error, ConnectionError) and address == "auto":
            raise RunError(f"there is no Ray cluster on this machine: {start}") from error
        where = "on this machine" if address == "local" else f"at {address}"
        raise RunError(f"Ray {where} cannot be used: {first_sentence(error)}") from error


def runtime_env(folder: str | None) -> dict[str, Any]:
    """Returns Ray's settings for the code to copy. A job submitted to the cluster has its own.

    folder: of the user's code; None: do not copy any.
    """
    if _SUBMITTED_AS_JOB in os.environ:
        return {}
    package = str(Path(__file__).parents[1])
    return {"py_modules": [package]} | ({"working_dir": folder} if folder else {})


def end_with(end: Callable[..., Any], *arguments: Any) -> None:
    """Ends something of Ray's. Ignores failures, because the connection may already be broken."""
    try:
        end(*arguments)
    except Exception as error:  # Ray raises anything, ValueError and ConnectionError included
        _log.info("Ray, at the end: %r", error)


@contextmanager
def last_words(who: str, how_to_go_on: str = RESUME) -> Iterator[None]:
    """Lets a shell print how to continue if this process dies in the block; who: prefix of the
    message.

    If the raylet dies, or if the head is out of reach for a minute, Ray kills every process that
    uses them, without an exception.
    """
    command = ["sh", "-c", 'read -r line || echo "$0" >&2', ENDED.format(who, how_to_go_on)]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield
    finally:
        shell.communicate("an end as it should be\n")


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restores the program's signal handlers, which Ray replaces, and starts processes that SIGHUP
    does not end. Ray itself only does this for SIGINT.

    A terminal that goes away also sends SIGHUP to Ray's processes, which the program still needs.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def first_sentence(error: BaseException) -> str:
    """Returns the first line of an error message; Ray appends addresses below it."""
    said = getattr(error, "error_message", None)  # what a RuntimeEnvSetupError says second
    text = str(said or error).strip() or type(error).__name__
    return " ".join(text.partition("\n")[0].split()).rstrip(".")


def _log_what_ray_prints(data: Mapping[str, Any], **_: Any) -> None:
    for line in data["lines"]:
        _log.info("Ray: %s", line)
