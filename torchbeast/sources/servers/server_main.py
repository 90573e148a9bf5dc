# SPDX-License-Identifier: Apache-2.0
"""The main module of environment-server processes; started by env_servers.py, never by a user.

A server runs until its stdin is closed, which also happens when the program that started it dies in
any way. Its stdout carries JSON reports, so output of the environment is redirected to stderr. The
process never imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchbeast.core.envs.spaces import action_space_to_json, observation_space_to_json
from torchbeast.core.nest_py import map_leaves
from torchbeast.errors import RunError
from torchbeast.processes.child_main import Report, exit_now, failure, follow_parent, take_stdout
from torchbeast.processes.descriptors import allow_descriptors, allowed_descriptors, are_used_up
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.counted import Activity, CountedEnv, report_until
from torchbeast.sources.servers.hosts import NoAddressError
from torchbeast.sources.servers.listening import check_listens
from torchbeast.sources.servers.told import TellingEnv
from torchbeast.sources.servers.waiting_clients import WaitingClients, can_be_watched

if TYPE_CHECKING:
    from torchbeast.core.envs.vec_env import VecEnv
    from torchbeast.envs import EnvSpec

_GRACE_S = 3.0  # for stopping after stdin was closed; a stuck environment is abandoned
_SERVING_S = 1.0  # between two looks whether the server has stopped before it served
# Open at once, for each stream that a learner is told to open: a second learner may use the
# servers, and a connection that was cut off without a word is open for half a minute.
_STREAMS_PER_STREAM = 4
_DESCRIPTORS = 1 << 14  # enough for strangers who only connect; their connections take 300 MB
_LOOK_S = 0.5  # between two looks whether they are used up, and whether clients are accepted
_LOOKS_IN_VAIN = 20  # until a server that accepts none of them is replaced


def main(arguments: dict[str, Any]) -> int:
    """Serves `arguments["env"]`; returns the exit code."""
    follow_parent()
    report = take_stdout()
    allow_descriptors(_DESCRIPTORS)
    serving: list[Any] = []
    served, stopped = threading.Event(), threading.Event()
    activity = Activity() if arguments["counts"] else None
    _thread(lambda: _end_with_stdin(serving, served, stopped, arguments))
    try:
        server = _make_server(arguments, activity)
    except Exception as error:
        report(failure(error))
        return 1
    serving.append(server)
    _thread(lambda: _report_when_serving(server, arguments["address"], served, stopped, report))
    _thread(lambda: _end_when_deaf(arguments["address"], served, stopped))
    if activity is not None:
        _thread(lambda: report_until(stopped, activity, report))
    try:
        server.run()
    except Exception as error:
        is_of_address = isinstance(error, ConnectionError)  # the server's own, without a traceback
        report(failure(RunError(str(error)) if is_of_address else error))
        return 1
    finally:
        stopped.set()
        _remove_folder(arguments)
    return 0


def _make_server(arguments: dict[str, Any], activity: Activity | None = None) -> Any:
    import libtorchbeast
    from torchbeast import envs
    from torchbeast.envs.opening import make_environment

    spec, num_envs = envs.EnvSpec.from_parent(arguments["env"]), arguments["envs_per_stream"]
    # The first one is made now, so that a wrong name is reported at once.
    first = [make_environment(spec, num_envs)]

    def make() -> Any:
        try:
            env: Any = first.pop()
        except IndexError:
            env = envs.make(spec, num_envs)
        if keywords := spec.options.info_keywords:
            env = TellingEnv(env, keywords)
        return env if activity is None else CountedEnv(env, activity)

    return libtorchbeast.Server(
        make,
        arguments["address"],
        description=_description(first[0], spec, arguments),
        max_streams=_STREAMS_PER_STREAM * arguments["num_streams"],
        credentials=_credentials(arguments["security"]),
    )


def _credentials(files: dict[str, Any] | None) -> Any:
    """Returns the credentials of a server that listens to other machines."""
    if files is None:
        return None
    from torchbeast.sources.servers.config import ServerSecurityConfig
    from torchbeast.sources.servers.credentials import server_credentials

    return server_credentials(ServerSecurityConfig(**files))


def _description(env: VecEnv, spec: EnvSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the description that a learner gets before it connects."""
    return {
        "env_id": spec.name,
        "num_envs": env.num_envs,
        "num_streams": arguments["num_streams"],
        "num_servers": arguments["num_servers"],
        "frame_stack": env.frame_stack,
        "observation": map_leaves(lambda spec: (spec.dtype, spec.shape), env.observation_space),
        "action_space": action_space_to_json(env.action_space),
        "observation_space": observation_space_to_json(env.observation_space),
        "options": {**_options(spec), **_env_kwargs(spec)},
        "info_keywords": list(spec.options.info_keywords),
    }


def _options(spec: EnvSpec) -> dict[str, Any]:
    """Returns the options without the info keywords: learners of earlier versions, which read
    options only, would log columns without a number.
    """
    return dataclasses.replace(spec.options, info_keywords=()).as_json()


def _env_kwargs(spec: EnvSpec) -> dict[str, Any]:
    """Returns the keyword arguments as an option; left out if empty, as in earlier versions."""
    return {"env_kwargs": spec.kwargs} if spec.kwargs else {}


def _report_when_serving(
    server: Any,
    address: str,
    served: threading.Event,
    stopped: threading.Event,
    report: Report,
) -> None:
    """Reports that the server accepts connections; ends the process if another program has one of
    its addresses.
    """
    while not server.wait_until_serving(_SERVING_S):
        if stopped.is_set():
            return
    served.set()
    try:
        if not address.startswith("unix:"):
            # Not known, as when strangers have all descriptors, or a name server does not answer.
            with contextlib.suppress(OSError, NoAddressError):
                check_listens(address)
    except Exception as error:
        report(failure(error))
        os._exit(1)
    report({"ready": True})


def _end_when_deaf(address: str, served: threading.Event, stopped: threading.Event) -> None:
    """Ends the process once it accepts no connection, so that another one takes its place.

    gRPC 1.51 stops listening when it cannot accept a connection, for good, and says nothing. That
    may be over within a moment, when those leave who took all descriptors.
    """
    served.wait()  # if it never serves, until the process ends
    clients: WaitingClients | None = None
    in_vain = 0
    while not stopped.wait(_LOOK_S):
        if are_used_up():
            _end(
                f"this server could have {allowed_descriptors():,} files and connections open, and "
                "has: it would accept no connection from now on, and ends. Keep strangers from its "
                "port, or raise the limit (ulimit -n)"
            )
        if not can_be_watched(address):
            continue
        with contextlib.suppress(OSError):  # used up at this moment: the next look decides
            clients = clients or WaitingClients(host_and_port(address)[1])
            in_vain = in_vain + 1 if clients.wait_in_vain() else 0
        if in_vain == _LOOKS_IN_VAIN:
            _end(
                f"this server has accepted no connection for {_LOOKS_IN_VAIN * _LOOK_S:.0f} s, "
                "though clients wait, and ends. It may have had as many files and connections "
                f"open as it could ({allowed_descriptors():,}) for a moment: keep strangers from "
                "its port, or raise the limit (ulimit -n)"
            )


def _end(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_stdin(
    serving: list[Any],
    served: threading.Event,
    stopped: threading.Event,
    arguments: dict[str, Any],
) -> None:
    """Stops the server when stdin is closed; exits if its environment does not return in time."""
    while os.read(0, 4096):
        pass
    for server in serving:
        _thread(server.stop)
    if not serving or not stopped.wait(_GRACE_S):
        if served.is_set():  # before that the socket may belong to another server
            _remove_socket(arguments)
        _remove_folder(arguments)
        exit_now(0)


def _remove_socket(arguments: dict[str, Any]) -> None:
    address = arguments["address"]
    if address.startswith("unix:"):
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)


def _remove_folder(arguments: dict[str, Any]) -> None:
    """Removes the run's folder of sockets if this was the last server in it."""
    if arguments["folder"] is None:
        return
    with contextlib.suppress(OSError):  # other servers still use it, or it is gone
        os.rmdir(arguments["folder"])


def _thread(body: Callable[[], None]) -> None:
    threading.Thread(target=body, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
