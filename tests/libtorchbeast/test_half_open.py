# SPDX-License-Identifier: Apache-2.0
"""A connection whose other end is gone without a word, as after a pulled cable."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from background import SOON, wait_for
from served_envs import Counting
from serving import Game, playing, serving

from libtorchbeast import server_status

NOTICED_S = 30.0 + 5.0  # 20 s of silence, 10 s for the answer to a ping; some for a busy machine


class Cable:
    """Forwards TCP connections to a port; once pulled, their ends hear nothing any more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: list[socket.socket] = []
        self._pulled = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def pull(self) -> None:
        """Cuts all connections of now, and refuses others until it is plugged in."""
        self._pulled.set()

    def plug_in(self) -> None:
        """Forwards new connections; those from before stay cut."""
        self._pulled = threading.Event()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                if self._pulled.is_set():
                    ours.close()
                    continue
                theirs = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [ours, theirs]
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(
                        target=self._forward, args=(*pair, self._pulled), daemon=True
                    ).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket, pulled: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not pulled.is_set():
                    target.sendall(data)
            if not pulled.is_set():
                target.shutdown(socket.SHUT_WR)


@pytest.mark.long
def test_a_pulled_cable_is_noticed_by_both_ends_and_mended_by_a_new_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cable, address = Cable(port), f"127.0.0.1:{port}"
    with contextlib.closing(cable), serving(Counting, address):
        with playing([cable.address], reconnect_timeout_s=600.0) as game:
            game.rollouts(2)
            assert server_status(address, SOON)["open_streams"] == 1
            pulled = time.monotonic()
            cable.pull()
            drain(game)
            wait_for(lambda: game.pool.lost_streams() == 1, NOTICED_S)
            wait_for(lambda: server_status(address, SOON)["open_streams"] == 0, NOTICED_S)
            assert time.monotonic() - pulled < NOTICED_S
            cable.plug_in()
            wait_for(lambda: game.pool.live_streams() == 1)
            game.rollouts(2)


def drain(game: Game) -> None:
    """Takes rollouts until the stream waits for its server, no longer for room in the queue."""
    while game.queue.size():
        game.rollout()
