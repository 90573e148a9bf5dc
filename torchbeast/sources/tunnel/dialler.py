# SPDX-License-Identifier: Apache-2.0
"""The host's side: dials the learner's door, again and again, and relays to its own servers.

One connection registers the host and carries beats. One more for each server waits in reserve; when
the door says "go", it is relayed to the server's Unix socket and another takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.handshake import ClosedError
from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.messages import (
    BEAT,
    BEAT_S,
    ENDED,
    GO,
    HANDSHAKE_S,
    SILENCE_S,
    HostHello,
    LaterError,
    RefusedError,
    SpareHello,
    admitted_as,
    as_name,
    as_told,
    host_line,
    raise_if_refused,
    spare_line,
)
from torchbeast.sources.tunnel.time_limit import within
from torchbeast.sources.tunnel.way import Way, reason

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # between two attempts
_CLOSED_S = 30.0  # of attempts that ended without a reason, until that is one


class Dialler:
    """Keeps a host's servers within the learner's reach, from `run` to `stop`.

    `run` belongs to a thread of its own; `stop` may be called by any.
    """

    def __init__(
        self,
        door: str,
        sockets: Sequence[str],
        files: LearnerSecurityConfig,
        tell: Callable[[str], None],
    ) -> None:
        """Checks the files, which are read again for each connection.

        door: HOST:PORT. sockets: paths of the servers' Unix sockets.
        tell: called with a sentence when the learner is reached, has ended, or is lost.

        Raises UsageError for files that cannot be used.
        """
        self._way, self._door, self._tell = Way(door, files), door, tell
        self._sockets = list(sockets)
        self._id, self._served = secrets.token_hex(16), ""
        self._was_there = False  # the learner, at least once
        self._closed_since: float | None = None  # every attempt ended without a reason
        self._said = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._is_stopped = False
        self._open: set[Connection] = set()

    def run(self, served: str) -> None:
        """Dials until `stop`; raises RunError or UsageError for what no attempt can mend, before
        the learner was there for the first time.

        served: the fingerprint of what the servers serve.
        """
        self._served = served
        asyncio.run(self._run())

    def stop(self) -> None:
        """Lets `run` end. May be called before it, and again."""
        self._is_stopped = True
        if self._loop is not None and self._stopped is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stopped.set)

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        if not self._is_stopped:
            await _first_of(self._dial_forever(), _wait(self._stopped))

    async def _dial_forever(self) -> None:
        await self._explain()  # says at once what no attempt will mend
        pause = _FIRST_PAUSE_S
        while True:
            try:
                control, label = await self._register()
                pause, self._said = _FIRST_PAUSE_S, ""
                self._tell(f"Connected to the learner at {self._door} as {label}.")
                await self._stay(control)
            except RefusedError as error:
                if not self._was_there:
                    raise RunError(f"{self._door}: {error}") from None
                self._tell_failure(f"{self._door}: {error}")
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                why = await self._explain()
                self._tell_failure(why or f"{self._door}: {reason(error, HANDSHAKE_S)}")
            finally:
                self._abort_all()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _tell_failure(self, why: str) -> None:
        self._tell_once(f"{why}; dialling again.")

    def _tell_once(self, sentence: str) -> None:
        if sentence != self._said:
            self._tell(sentence)
        self._said = sentence

    async def _register(self) -> tuple[Connection, str]:
        """Returns the connection of a host that was admitted, and its label at the learner."""
        control = await self._dial()
        name = as_name(socket.gethostname())
        control.send(host_line(HostHello(name, self._id, len(self._sockets), self._served)))
        label = admitted_as(await within(HANDSHAKE_S, control.line()))
        self._was_there = True
        return control, label

    async def _stay(self, control: Connection) -> None:
        """Keeps connections in reserve until the learner is lost, which raises ConnectionError."""
        spares = [self._keep_spare(i) for i in range(len(self._sockets))]
        await _first_of(_beat(control), self._listen(control), *spares)

    async def _listen(self, control: Connection) -> None:
        """Hears the door; raises ConnectionError with the reason when it is gone."""
        while True:
            try:
                line = await within(SILENCE_S, control.line())
            except asyncio.TimeoutError:
                why = f"nothing was heard of the learner for {SILENCE_S:g} s"
                raise ConnectionError(why) from None
            if line == ENDED:
                raise ConnectionError("the learner has ended")
            if (sentence := as_told(line)) is not None:
                self._tell_once(f"{self._door}: {sentence}")
            elif line != BEAT:
                raise LaterError("the door said something that this version does not understand")

    async def _keep_spare(self, server: int) -> None:
        """Holds one connection for the server, and hands it over whenever the door asks."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                spare = await self._dial()
                spare.send(spare_line(SpareHello(self._id, server)))
                line = await spare.line()
                raise_if_refused(line)
                if line != GO:
                    raise ValueError("the door said something that this version does not know")
                await self._relay(spare, server)
                pause = _FIRST_PAUSE_S
            except (OSError, ValueError, RefusedError, asyncio.TimeoutError) as error:
                if not isinstance(error, (OSError, asyncio.TimeoutError)):  # others end soon
                    self._tell_failure(f"{self._door}: {error}")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _relay(self, spare: Connection, server: int) -> None:
        """Joins a connection of the learner with one to the server's socket."""
        local = self._new()
        try:
            await asyncio.get_running_loop().create_unix_connection(
                lambda: local, self._sockets[server]
            )
        except OSError:  # the server is being replaced; the learner tries again
            self._drop(local)
            spare.close()
            return
        spare.join(local)

    async def _dial(self) -> Connection:
        """Returns a new connection that has sent the token to a door.

        Raises OSError or TimeoutError if there is none, RefusedError if it is none.
        """
        connection = self._new()
        try:
            await within(HANDSHAKE_S, self._way.greet(connection))
        except BaseException:
            self._drop(connection)
            raise
        return connection

    async def _explain(self) -> str:
        """Says why the next attempt must fail like this one; "" if it may not.

        Raises RunError or UsageError instead, if no learner was ever there: one that was there
        comes back, whatever uses its port meanwhile.
        """
        closed_since, self._closed_since = self._closed_since, None
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._way.explain)
        except (RunError, UsageError) as error:
            if isinstance(error, ClosedError):  # a learner that ends at this moment does it too
                now = time.monotonic()
                self._closed_since = now if closed_since is None else closed_since
                if now - self._closed_since < _CLOSED_S:
                    return ""
            if not self._was_there:
                raise
            return str(error)
        return ""

    def _new(self) -> Connection:
        connection = Connection()
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        self._open.discard(connection)

    def _abort_all(self) -> None:
        for connection in list(self._open):
            self._drop(connection)


async def _beat(control: Connection) -> None:
    while True:
        control.send(BEAT)
        await asyncio.sleep(BEAT_S)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _first_of(*bodies: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first one ends, and cancels the others; raises what it raised."""
    tasks = [asyncio.ensure_future(body) for body in bodies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
