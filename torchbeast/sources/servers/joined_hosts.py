# SPDX-License-Identifier: Apache-2.0
"""The hosts whose streams are in a running pool, while others come and some leave.

    a host that comes --- described, compared with the first ---> pool.add
    one that leaves   ------------------------------------------> pool.remove

Nothing here ends the run: a host that does not answer, or serves something else, is a warning and
is asked again.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from torchbeast.core.wording import counted
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.memory import free_memory, in_bytes
from torchbeast.reporting.waiting import say
from torchbeast.sources.servers.discovery import Fleet, Host, check_same
from torchbeast.sources.servers.stream_limit import check_streams

_log = logging.getLogger("torchbeast.hosts")

ANSWER_S = 2.0
"""Seconds in which each server of a host that comes must answer."""

_AGAIN_S = 15.0  # until a host that is not used is asked again
_TAKEN_AFTER_S = 60.0  # by the first rollouts of a host that was added
_MOST_BYTES = 7 << 30  # of a stream's rollout; the pool, which counts a little more, ends at 8 GiB
_AMOUNT = re.compile(r"[\d.]+ [MG]B")  # of memory, as `in_bytes` formats it
_NONE = "no host"  # what a warning is about


class Streams(Protocol):
    """The methods of ActorPool that change its streams."""

    def add(self, env_server_addresses: Sequence[str]) -> None:
        """Adds a stream for each address."""

    def remove(self, env_server_address: str) -> int:
        """Removes the streams of the server at the address; returns their number."""

    def away_streams(self) -> list[tuple[str, float, str]]:
        """Returns (address, seconds since the loss, why) for each stream that is lost now."""


class RolloutShape(NamedTuple):
    """What the rollouts of a run ask of a host that comes."""

    columns: int  # each stream must have a multiple of so many environments
    env_bytes: int  # of the rollout of one environment
    ranks: int = 1  # that share the streams


class Hosts(Protocol):
    """Hosts that may change while a run goes on."""

    def follow(self, streams: Streams, shape: RolloutShape, closed: threading.Event) -> None:
        """Changes the streams as the hosts change, until closed.

        shape: which the streams of a host that comes must fit.
        """


class JoinedHosts:
    """The hosts of a pool by name, each added and removed with all its servers. For one thread."""

    def __init__(self, fleet: Fleet) -> None:
        """Takes over the hosts of the start, with whose first server all later ones must agree."""
        self._joined = {host.name: host for host in fleet.hosts}
        self._first = fleet.hosts[0].called[0]
        self._again: dict[str, float] = {}  # when to ask a host again that is not used
        self._reasons: dict[str, str] = {}  # why a host is not used
        self._told: dict[str, str] = {}  # the last warning, by what it is about
        self._promised: dict[str, tuple[float, int]] = {}  # when and how many bytes, by host

    @property
    def joined(self) -> Mapping[str, Host]:
        """The hosts whose streams are in the pool."""
        return self._joined

    def may_be_asked(self, name: str, now: float) -> bool:
        """Returns whether a host was not asked in vain a moment ago."""
        return self._again.get(name, now) <= now

    def add(
        self,
        name: str,
        describe: Callable[[], Host],
        streams: Streams,
        shape: RolloutShape,
        now: float,
    ) -> str:
        """Adds a host, unless it was asked in vain a moment ago; returns why it cannot take part,
        "" where it can or was not asked.

        describe: asks its servers; raises RunError or UsageError if the host cannot take part.
        """
        if not self.may_be_asked(name, now):
            return ""
        try:
            host = self._fitting(describe(), shape, now)
        except (RunError, UsageError) as error:
            self._again[name] = now + _AGAIN_S
            reason = self._as_before(name, str(error))
            self.warn(name, f"the host {name} is not used: {reason}; it is tried again")
            return reason
        self.forget(name)
        self._joined[name] = host
        streams.add(host.stream_addresses)
        say(f"added host {name} ({counted(len(host.stream_addresses), 'stream')})")
        return ""

    def remove(self, name: str, streams: Streams) -> None:
        """Removes the streams of a host."""
        host = self._joined.pop(name)
        self._promised.pop(name, None)
        removed = sum(streams.remove(address) for address in host.servers)
        say(f"removed host {name} ({counted(removed, 'stream')})")

    def warn_if_none_is_left(self) -> None:
        """Says that the run ends without a host, of whose lost streams nobody hears any more."""
        if self._joined:
            self.forget(_NONE)
        else:
            self.warn(_NONE, "no host is left: the run ends within a minute unless one is added")

    def forget_others(self, names: Collection[str]) -> None:
        """Forgets those that were asked in vain and are not among these."""
        for name in self._again.keys() - set(names):
            self.forget(name)

    def forget(self, about: str) -> None:
        """Lets a host be asked at once, and the next warning about it or anything else be said."""
        self._again.pop(about, None)
        self._reasons.pop(about, None)
        self._told.pop(about, None)

    def warn(self, about: str, sentence: str) -> None:
        """Warns, but not again of the same."""
        if self._told.get(about) != sentence:
            self._told[about] = sentence
            _log.warning(sentence)

    def _as_before(self, name: str, reason: str) -> str:
        """Returns the last reason if only amounts of memory differ: what is free changes all the
        time, and the same is said once.
        """
        before = self._reasons.setdefault(name, reason)
        if _AMOUNT.sub("", before) != _AMOUNT.sub("", reason):
            self._reasons[name] = reason
        return self._reasons[name]

    def _fitting(self, host: Host, shape: RolloutShape, now: float) -> Host:
        """Returns the host, with memory promised to it; raises RunError if it cannot take part."""
        columns = shape.columns
        for called, said in host.called:
            check_same(*self._first, called, said)
            if said["num_envs"] % columns:
                raise RunError(
                    f"a stream of {called} has {said['num_envs']} environments, and rollouts of "
                    f"this run join {columns}: start it with a multiple of {columns} per stream"
                )
            _check_stream(called, said["num_envs"] * shape.env_bytes)
        count = sum(len(each.stream_addresses) for each in (*self._joined.values(), host))
        check_streams(-(-count // shape.ranks))
        self._promise_memory(host, shape.env_bytes, now)
        return host

    def _promise_memory(self, host: Host, env_bytes: int, now: float) -> None:
        """Raises RunError when the memory cannot hold a rollout of each environment of a host.

        Hosts that were added a moment ago have not taken theirs yet.
        """
        envs = sum(said["num_streams"] * said["num_envs"] for said in host.servers.values())
        recent = [size for when, size in self._promised.values() if now - when < _TAKEN_AFTER_S]
        promised, free = sum(recent), free_memory()
        if free is not None and envs * env_bytes > free - promised:
            raise RunError(
                f"the rollouts of its {envs} environments would take {in_bytes(envs * env_bytes)} "
                f"of memory, but {in_bytes(max(0, free - promised))} are free on the learner's "
                "machine: serve fewer environments there, or shorten --unroll_length"
            )
        self._promised[host.name] = now, envs * env_bytes


def _check_stream(called: str, num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise RunError(
            f"the rollouts of a stream of {called} would take {in_bytes(num_bytes)}, expected at "
            f"most {in_bytes(_MOST_BYTES)}: serve fewer environments in a "
            "stream (more --num_servers)"
        )
