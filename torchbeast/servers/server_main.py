# SPDX-License-Identifier: Apache-2.0
"""The main module of environment-server processes. Started by env_servers.py, not by users.

A server runs until its stdin is closed, including when the program that started it dies. Its
stdout carries JSON reports, so output of the environment is redirected to stderr. The process
imports torch only for self-play.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.contract import final_info_of, numbers_of_games
from torchbeast.core.envs.spaces import space_to_json
from torchbeast.errors import RunError, started
from torchbeast.fleets.child_process import SendReport, exit_now, follow_stdin, run_child
from torchbeast.fleets.system import allow_descriptors, allowed_descriptors
from torchbeast.fleets.waiting import running_time, wait_until
from torchbeast.servers.addresses import PROBE_EVERY_S, PortCheck, check_free, socket_path

if TYPE_CHECKING:
    from torchbeast.core.envs.vec_env import VecEnv
    from torchbeast.envs import EnvSpec

_GRACE_S = 3.0  # to stop after stdin is closed; a stuck environment is abandoned
_REPORT_EVERY_S = 1.0  # between two reports about the environments
_SERVING_S = 1.0  # between two checks whether the server stopped before it served
# Connections per stream that a learner should open: a second learner may use the servers, and
# connections that are cut off silently stay open for half a minute.
_STREAMS_PER_STREAM = 4
_DESCRIPTORS = 1 << 14  # enough for strangers who only connect, which takes 300 MB


class ServerActivity:
    """Counts what the environments of a process do: their steps, and how many each stream has open.
    They are metrics of polybeast_env, which cannot query the server because it lacks a learner's
    certificate. Any thread may use it.
    """

    def __init__(self, num_streams: int) -> None:
        self._lock = threading.Lock()
        self._steps, self._open = 0, [0] * num_streams

    def opens(self) -> int:
        """Counts another open stream, and returns its number: one that comes back gets the number
        of the one that was lost.
        """
        with self._lock:
            number = self._open.index(min(self._open))
            self._open[number] += 1
            return number

    def closed(self, number: int) -> None:
        """Notes that a stream of this number was closed."""
        with self._lock:
            self._open[number] -= 1

    def stepped(self, count: int) -> None:
        """Adds to the number of steps."""
        with self._lock:
            self._steps += count

    def report_until(self, stopped: threading.Event, report: SendReport) -> None:
        """Reports the counts to the parent, about once a second."""
        while not stopped.wait(_REPORT_EVERY_S):
            with self._lock:
                counts = {"steps": self._steps, "open_streams": sum(self._open)}
            report(counts)


class ServedEnv:
    """The vector environment of one stream; it counts its steps.

    With K info keywords, its steps have a last value for `libtorchbeast.Server`: the numbers of the
    episodes that ended, float32 [N, K], or None.
    """

    def __init__(
        self, env: Any, keywords: Sequence[str], activity: ServerActivity, number: int
    ) -> None:
        """number: of the stream, which is open in `activity`."""
        self._env, self._keywords = env, tuple(keywords)
        self._activity, self._number = activity, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> tuple[Any, ...]:
        """Steps all environments."""
        self._activity.stepped(self._env.num_envs)
        step: tuple[Any, ...] = self._env.step(action)
        return (*step, self._numbers(step)) if self._keywords else step

    def _numbers(self, step: Any) -> np.ndarray | None:
        games = np.flatnonzero(step.episode_end).tolist()
        info = final_info_of(self._env)
        return numbers_of_games(info, self._keywords, games) if games else None

    def close(self) -> None:
        """Closes the environments."""
        self._activity.closed(self._number)
        self._env.close()


def main(arguments: dict[str, Any]) -> int:
    """Serves `arguments["env"]`; returns the exit code."""
    return run_child(lambda report: _Serving(arguments, report).run())


class _Serving:
    """The server of this process, or its streams that join learners."""

    def __init__(self, arguments: dict[str, Any], report: SendReport) -> None:
        self._arguments, self._report = arguments, report
        self._activity = ServerActivity(arguments["num_streams"])
        self._stopped = threading.Event()
        self._server: Any = None  # until the first environment is made

    def run(self) -> None:
        """Makes the server and serves, until stdin is closed or the learner's run has ended."""
        allow_descriptors(_DESCRIPTORS)
        follow_stdin(self._dial, self._stop)
        try:
            self._server = _make_server(self._arguments, self._activity, self._report)
            self._start_reporting()
            if self._server.run():
                self._report({"run_has_ended": True})
        except ConnectionError as error:  # of the server's address
            raise RunError(str(error)) from error  # without a traceback
        finally:
            self._stopped.set()
            self._remove_folder()

    def _dial(self, _: bytes) -> None:
        # The parent says it again to a replacement that was still starting.
        if self._arguments["learners"] and self._server is not None:
            self._server.dial()

    def _stop(self) -> None:
        """Stops the server; exits if an environment does not return in time."""
        is_serving = self._server is not None
        if is_serving:
            _thread(self._server.stop)
        if not is_serving or not wait_until(running_time() + _GRACE_S, self._stopped.wait):
            if is_serving and (path := socket_path(self._arguments["address"])) is not None:
                path.unlink(missing_ok=True)
            self._remove_folder()
            exit_now(0)

    def _remove_folder(self) -> None:
        """Removes the run's folder of sockets if this was the last server in it."""
        if self._arguments["folder"] is not None:
            with contextlib.suppress(OSError):  # still in use by other servers, or already gone
                os.rmdir(self._arguments["folder"])

    def _start_reporting(self) -> None:
        """Starts the threads that report, and that check whether the server still listens."""
        _thread(lambda: self._activity.report_until(self._stopped, self._report))
        if self._arguments["learners"]:
            self._report({"ready": True})
        else:
            _thread(self._watch)

    def _watch(self) -> None:
        """Reports that the server accepts connections. If it no longer does, ends the process, so
        that it is replaced.
        """
        address = self._arguments["address"]
        while not self._server.wait_until_serving(_SERVING_S):
            if self._stopped.is_set():
                return
        self._report({"ready": True})
        port = PortCheck(address)
        while socket_path(address) is not None or not port.is_deaf():
            if self._stopped.wait(PROBE_EVERY_S):
                return
        print(
            "this server can no longer accept connections, and exits. It may have reached its "
            f"limit of {allowed_descriptors():,} open files and connections: block unknown clients "
            "from its port, or raise the limit (ulimit -n)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _make_server(arguments: dict[str, Any], activity: ServerActivity, report: SendReport) -> Any:
    """Returns a server, or streams that join learners."""
    import libtorchbeast
    from torchbeast import envs
    from torchbeast.envs import make_environment
    from torchbeast.servers.config import SecurityConfig
    from torchbeast.servers.security import credentials

    spec, num_envs = envs.EnvSpec.from_parent(arguments["env"]), arguments["envs_per_stream"]
    num_streams = arguments["num_streams"]
    if num_streams > 1 < len(spec.task_names):  # compare the tasks of all streams
        here = [count > 0 for count in spec.dealt(0, num_envs * num_streams).options.task_shares]
        make_environment(spec.with_shares(here), sum(here)).close()
    # One is made now, so that a wrong name is reported immediately. Streams make their own: some
    # objects, such as connections of SQLite, belong to the thread that made them.
    first = make_environment(spec.dealt(0, num_envs), num_envs)
    description = _description(first, spec, arguments)
    with contextlib.suppress(Exception):  # as when a stream's environments are closed
        first.close()
    keywords = spec.options.info_keywords

    def make() -> Any:
        number = activity.opens()
        try:
            env: Any = envs.make(spec.dealt(num_envs * number, num_envs), num_envs)
        except BaseException:
            activity.closed(number)
            raise
        return ServedEnv(env, keywords, activity, number)

    files = arguments["security"]
    if arguments["learners"]:
        from torchbeast.servers.joining import JoiningStreams

        security = SecurityConfig(**files)
        return JoiningStreams(make, description, arguments["learners"], security, report)
    if socket_path(arguments["address"]) is None:
        check_free(arguments["address"])  # gRPC accepts it if some addresses of a name are free
    return libtorchbeast.Server(
        make,
        arguments["address"],
        description=description,
        max_streams=_STREAMS_PER_STREAM * arguments["num_streams"],
        credentials=None if files is None else credentials(SecurityConfig(**files)),
    )


def _description(env: VecEnv, spec: EnvSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the description that a learner gets before it connects.

    Its options contain neither the info keywords, which come with the steps, nor the tasks' shares,
    which differ between servers, nor the scale of their returns and the folder of self-play, which
    the learner's own flags decide. They contain keyword arguments unless these are empty.
    """
    others = {"selfplay": None, "info_keywords": (), "task_shares": (), "task_returns": ()}
    options = vars(spec.options) | others
    return {
        "env_id": spec.name,
        "num_envs": env.num_envs,
        "num_streams": arguments["num_streams"],
        "num_servers": arguments["num_servers"],
        "frame_stack": env.frame_stack,
        "observation": map_leaves(lambda spec: (spec.dtype, spec.shape), env.observation_space),
        "action_space": space_to_json(env.action_space),
        "observation_space": space_to_json(env.observation_space),
        "options": options | ({"env_kwargs": spec.kwargs} if spec.kwargs else {}),
        "info_keywords": list(spec.options.info_keywords),
    }


def _thread(body: Callable[[], None]) -> None:
    started(threading.Thread(target=body, daemon=True))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
