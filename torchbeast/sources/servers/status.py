# SPDX-License-Identifier: Apache-2.0
"""Asks environment servers what they serve and how busy they are."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libtorchbeast
from torchbeast.errors import RunError
from torchbeast.sources.servers.addresses import server_addresses
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.credentials import learner_credentials
from torchbeast.sources.servers.discovery import Asking
from torchbeast.sources.servers.handshake import client_tls, explain

_Described = dict[str, Any] | RunError
_INTERVAL_S = 1.0  # over which steps are counted


@dataclass(frozen=True)
class Status:
    """The answers of one server; error: a sentence with its address if there are none."""

    address: str
    error: str = ""
    serves: str = ""  # the environment's name
    envs: int = 0  # of all its streams
    streams: int = 0  # that a learner opens
    open_streams: int = 0
    since: datetime.datetime | None = None
    steps: int = 0  # of environments, since then
    steps_per_s: float = 0.0


def ask(basenames: Sequence[str], asking: Asking) -> list[Status]:
    """Returns the status of every server of these hosts, or of the servers on this machine."""
    described: dict[str, _Described] = {}
    for basename in basenames:
        described |= _described(basename, asking)
    before = {address: _busy(address, said, asking) for address, said in described.items()}
    if any(before.values()):
        time.sleep(_INTERVAL_S)
    return [
        _status(address, said, before[address], _busy(address, said, asking))
        for address, said in described.items()
    ]


def ask_learner(
    learner: str, security: LearnerSecurityConfig, timeout: float
) -> list[tuple[str, int, int, float]]:
    """Returns name, streams, environments and seconds since it joined of each host of a learner.

    Raises RunError if no learner answers that hosts can dial in to.
    """
    credentials = learner_credentials(security)
    try:
        hosts = libtorchbeast.server_status(learner, timeout, credentials)["hosts"]
    except (OSError, ValueError) as error:
        explain(learner, security, client_tls(security))
        raise RunError(f"no learner answers at {learner} ({error})") from None
    return list(hosts)


def _described(basename: str, asking: Asking) -> dict[str, _Described]:
    """Returns the descriptions of the servers of a host, or why there are none."""
    (first,) = server_addresses(basename, 1)
    said = _description(first, asking)
    count = 1 if isinstance(said, RunError) else max(1, said["num_servers"])
    others = server_addresses(basename, count)[1:]
    return {first: said} | {address: _description(address, asking) for address in others}


def _description(address: str, asking: Asking) -> _Described:
    try:
        return asking.ask(address)
    except RunError as error:
        return error


def _busy(address: str, said: _Described, asking: Asking) -> dict[str, Any]:
    """Returns how busy a server is; {} if it does not tell, as servers of earlier versions."""
    if isinstance(said, RunError):
        return {}
    try:
        return libtorchbeast.server_status(address, asking.timeout, asking.credentials)
    except (OSError, ValueError):
        return {}


def _status(
    address: str,
    said: _Described,
    before: dict[str, Any],
    after: dict[str, Any],
) -> Status:
    if isinstance(said, RunError):
        return Status(address, error=str(said))
    if not before or not after:
        return Status(address, error=f"{address} answers, but does not tell how busy it is")
    seconds = max(after["uptime_s"] - before["uptime_s"], 1e-3)
    return Status(
        address,
        serves=said["env_id"],
        envs=said["num_envs"] * said["num_streams"],
        streams=said["num_streams"],
        open_streams=after["open_streams"],
        since=datetime.datetime.now() - datetime.timedelta(seconds=after["uptime_s"]),
        steps=after["steps"],
        steps_per_s=max(0, after["steps"] - before["steps"]) / seconds,
    )
