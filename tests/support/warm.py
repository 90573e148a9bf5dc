# SPDX-License-Identifier: Apache-2.0
"""Children of the tests that need not import torch, which takes more than a second of a core.

    tests --- request, descriptors ---> warm process, which has imported torch
          <-- process id, in a pipe --      |
                                            forks ---> child

The warm process forks one that forks the child and ends, and the child becomes one of the tests'
process, as if that had started it. The system still shows the command and the variables of the warm
process. Whole programs of long tests, and the children of all programs but the agents of a sweep
that runs in the tests' process, import what they need.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import psutil

WITH_TORCH = ("actor_main", "agent_main", "local_main")  # the children that import it
WITHOUT = "env_worker"  # a worker of local_main that does not
PIPE = subprocess.PIPE  # for those that start children by this module
_ADOPT = 36  # Linux's PR_SET_CHILD_SUBREAPER
_HIGH = 300  # above the descriptors that a child inherits


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts a child WITH_TORCH, a script, a module by its name (-m) or code (-c) without arguments
    from the warm process, and anything else as always.
    """

    def _execute_child(self, args: Sequence[str], *more: Any) -> None:
        is_child = args[-2].endswith(WITH_TORCH) and WITHOUT not in args[-1]
        is_warm = is_child or args[1] == "-m" or args[1].endswith(".py") or args[1:-1] == ["-c"]
        if sys.platform != "linux" or not is_warm:
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        _, _, _, pass_fds, cwd, env, _, _, _, *pipes = more[:15]
        folder = os.path.abspath(cwd or ".")
        request = {"args": args[1:], "folder": folder, "env": {**(env or os.environ)}}
        standard = [
            i if pipe < 0 else pipe for i, pipe in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        self.pid = _forked(request | {"kept": pass_fds}, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code to its end."""
    words = [sys.executable, "-c", code]
    with Popen(words, stdout=PIPE, stderr=PIPE, text=True) as process:
        output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def children(recursive: bool = False) -> list[psutil.Process]:
    """Returns what this process has started without the warm one."""
    return [each for each in psutil.Process().children(recursive) if each.pid != _Warm.pid]


class _Warm:
    """The warm process of this one, once it is needed."""

    lock = threading.Lock()
    pid = 0
    process: subprocess.Popen[bytes]  # kept until this process ends
    ours, theirs = socket.socketpair()  # from the start: a test may count descriptors


def _forked(request: dict[str, Any], descriptors: list[int]) -> int:
    """Returns the process id of a new child that has these descriptors.

    Each request has a pipe of its own for the answer: a Ctrl-C may come before the answer, which
    the next request would then take for its own.
    """
    libc = ctypes.CDLL(None)
    answers, answering = os.pipe()
    with _Warm.lock, tempfile.TemporaryFile("w+") as file, os.fdopen(answers, "rb") as answer:
        if not _Warm.pid:
            _start()
        json.dump(request, file)
        file.seek(0)
        libc.prctl(_ADOPT, 1, 0, 0, 0)
        try:
            socket.send_fds(_Warm.ours, [b"\n"], [file.fileno(), answering, *descriptors])
            os.close(answering)
            return int(answer.read())  # its end comes when the child is ours
        finally:
            libc.prctl(_ADOPT, 0, 0, 0, 0)


def _start() -> None:
    with _Warm.theirs as theirs:
        words = [sys.executable, __file__, str(theirs.fileno())]
        _Warm.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
    _Warm.pid = _Warm.process.pid


# --- in the warm process


def _serve(requests: socket.socket, path: list[str]) -> None:
    """Forks children until nobody asks any more; returns in a child, with its words in sys.argv."""
    while True:
        received, descriptors, *_ = socket.recv_fds(requests, 1, 250)
        if not received:
            sys.exit()
        with open(descriptors.pop(0)) as file:
            request = json.load(file)
        answering = descriptors.pop(0)
        if request["args"][0] == "-c" and request["args"][2:]:  # a ChildProcess
            importlib.import_module(request["args"][-2])
        if (between := os.fork()) == 0:
            if child := os.fork():
                with contextlib.suppress(BrokenPipeError):  # a Ctrl-C: the test does not wait
                    os.write(answering, str(child).encode())
                os._exit(0)
            requests.close()
            _become(request, descriptors, path)
            return
        os.waitpid(between, 0)
        for descriptor in [answering, *descriptors]:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int], path: list[str]) -> None:
    """Gives this process the folder, variables and descriptors that are asked for."""
    os.setsid()
    given = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in descriptors]
    os.closerange(3, _HIGH)
    for old, new in zip(given, [0, 1, 2, *request["kept"]], strict=True):
        os.dup2(old, new)
        os.close(old)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv[:] = request["args"]
    first = os.path.dirname(sys.argv[0]) if sys.argv[0].endswith(".py") else ""
    sys.path[:] = [first, *filter(None, folders), *path]


if __name__ == "__main__":
    importlib.import_module("torch")
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.path[1:])
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    elif sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
