# SPDX-License-Identifier: Apache-2.0
"""A time limit for what a task awaits, under which no cancellation of the task is lost.

asyncio.wait_for loses it before Python 3.12 when what is awaited ends at the same moment. The task
then runs on, and whoever cancelled it and waits for its end does so for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, awaited: Awaitable[T]) -> T:
    """Returns what is awaited; after so many seconds cancels it and raises asyncio.TimeoutError."""
    future = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait({future}, timeout=seconds)
    finally:
        if not future.done():
            future.cancel()
        future.add_done_callback(_retrieve)
    if not done:
        raise asyncio.TimeoutError
    return future.result()


def _retrieve(future: asyncio.Future[T]) -> None:
    """Keeps asyncio from reporting an exception for which nobody waits any more."""
    if not future.cancelled():
        future.exception()
