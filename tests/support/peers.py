# SPDX-License-Identifier: Apache-2.0
"""The other end of the wire in plain grpcio: it exchanges bytes without parsing or checks."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from background import SOON

SERVICE = "rpcenv.RPCEnvServer"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class RawStream:
    """A client's stream of raw messages."""

    def __init__(
        self, address: str, method: str = "StreamingEnv", service: str = SERVICE, token: str = ""
    ) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        call = self._channel.stream_stream(f"/{service}/{method}")
        metadata = [("authorization", f"Bearer {token}")] if token else None
        self._call = call(iter(self._requests.get, None), timeout=SOON, metadata=metadata)

    def __enter__(self) -> RawStream:
        return self

    def __exit__(self, *_: Any) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._channel.close()

    def send(self, message: bytes) -> None:
        self._requests.put(message)

    def read(self) -> bytes:
        """Returns the next message."""
        return next(self._call)

    def half_close(self) -> None:
        self._requests.put(None)

    def end(self) -> tuple[grpc.StatusCode, str]:
        """Returns the status and its message, once no more messages come."""
        with contextlib.suppress(grpc.RpcError):
            for message in self._call:
                raise AssertionError(f"expected the end of the stream, got {message!r}")
        return self._call.code(), self._call.details()


def ask(address: str, method: str, message: bytes = b"") -> bytes:
    """Returns the answer to one message."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        return channel.unary_unary(f"/{SERVICE}/{method}")(message, timeout=SOON)


Stream = Callable[[Iterator[bytes], grpc.ServicerContext], Iterable[bytes]]


@dataclass(frozen=True)
class Unary:
    """Answers a single message with what `answer` returns then."""

    answer: Callable[[], bytes]


@contextlib.contextmanager
def raw_server(
    address: str,
    compression: grpc.Compression | None = None,
    service: str = SERVICE,
    **methods: Stream | Unary | bytes,
) -> Iterator[grpc.Server]:
    """Runs a server of these methods: a stream, or bytes that answer a single message.

    All other methods are UNIMPLEMENTED, as in servers that do not know them.
    """
    handlers = {name: _handler(method) for name, method in methods.items()}
    server = grpc.server(
        futures.ThreadPoolExecutor(4),
        handlers=[grpc.method_handlers_generic_handler(service, handlers)],
        options=_OPTIONS,
        compression=compression,
    )
    server.add_insecure_port(address)
    server.start()
    try:
        yield server
    finally:
        server.stop(None).wait(SOON)


def _handler(method: Stream | Unary | bytes) -> grpc.RpcMethodHandler:
    if isinstance(method, Unary):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: method.answer())
    if isinstance(method, bytes):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: method)
    return grpc.stream_stream_rpc_method_handler(method)


class Script:
    """A stream that sends one of these messages for each that it receives, which it keeps.

    With `speaks_first` it sends the first one unasked. After the last message it waits for the
    other side to end.
    """

    def __init__(self, messages: Iterable[bytes], *, speaks_first: bool) -> None:
        self._messages = messages
        self._speaks_first = speaks_first
        self.received: list[bytes] = []
        self.half_closed = threading.Event()

    def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        speaks_first = self._speaks_first
        for message in self._messages:
            if not speaks_first:
                if (request := next(requests, None)) is None:
                    self.half_closed.set()
                    return
                self.received.append(request)
            speaks_first = False
            yield message
        self.received.extend(requests)
        self.half_closed.set()
