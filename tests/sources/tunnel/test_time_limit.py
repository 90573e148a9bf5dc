# SPDX-License-Identifier: Apache-2.0
"""A time limit neither loses a cancellation nor leaves behind what it awaited."""

from __future__ import annotations

import asyncio

import pytest

from torchbeast.sources.tunnel.time_limit import within


def test_the_result_and_the_error_of_what_is_awaited_come_through() -> None:
    async def fails() -> None:
        raise ValueError("of the body")

    async def body() -> None:
        assert await within(100.0, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="of the body"):
            await within(100.0, fails())

    asyncio.run(body())


def test_what_takes_too_long_is_cancelled() -> None:
    async def body() -> None:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.0, never)
        assert never.cancelled()

    asyncio.run(body())


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_task_that_is_cancelled_as_what_it_awaits_ends_is_cancelled(ends_first: bool) -> None:
    async def body() -> None:
        awaited = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(within(100.0, awaited))
        await asyncio.sleep(0)  # the task waits now
        if ends_first:
            awaited.set_result(None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert awaited.done()

    asyncio.run(body())
