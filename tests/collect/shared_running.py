# SPDX-License-Identifier: Apache-2.0
"""A shared replay at a socket, served by a thread of the test."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from background import Background

from torchbeast.collect.replay import JoinRequest
from torchbeast.collect.shared_replay import Service, SharedReplayClient
from torchbeast.core.storages.replay.store import row_specs


@contextmanager
def service_at(path: Path, free: int | None = None) -> Iterator[Service]:
    """Serves until the end of the block; fails the test if the service fails."""
    service = Service(path)
    read, write = os.pipe()
    unused = mock.patch("torchbeast.collect.shared_replay.free_memory", lambda: free)
    with os.fdopen(read, "rb") as ends, unused:
        serving = Background(service.run, ends)
        try:
            yield service
        finally:
            os.close(write)
            serving.result()


def joining(
    specs: Mapping[str, Any], columns: int, spare: int, name: str = "a", **settings: Any
) -> JoinRequest:
    """How an agent joins that inserts `columns` and reads `spare` columns at once."""
    return JoinRequest(
        name=name,
        row=row_specs(specs, 1),
        unroll_length=specs["reward"].shape[0] - 1,
        columns=columns,
        spare_columns=spare,
        **{"frame_stack": 1, "replay_size": 2000, "seed": 0} | settings,
    )


@contextmanager
def agent_of(path: Path, how: JoinRequest) -> Iterator[SharedReplayClient]:
    client = SharedReplayClient(str(path), how)
    try:
        yield client
    finally:
        client.close()
