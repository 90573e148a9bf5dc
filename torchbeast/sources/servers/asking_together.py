# SPDX-License-Identifier: Apache-2.0
"""Asks many hosts at the same time, so that one that does not answer holds up no other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

_MOST = 64  # at once; each takes a thread and a connection
_GLANCE_S = 0.1

_Answer = TypeVar("_Answer")


def _nothing() -> None:
    pass


def asked_together(
    ask: Callable[[str], _Answer], names: Collection[str], glance: Callable[[], None] = _nothing
) -> dict[str, Callable[[], _Answer]]:
    """Asks hosts, each in a thread of its own; returns when the last one has answered or not.

    ask: returns the answer of a name, or raises, within a time of its own, which ends the wait. It
    is called by many threads at once. glance: called by this thread ten times a second meanwhile.

    Returns, for each name in the same order, what `ask` did: the result returns the answer or
    raises the error.
    """
    if not names:
        return {}
    with ThreadPoolExecutor(min(len(names), _MOST)) as threads:
        answers = {name: threads.submit(ask, name) for name in names}
        while wait(answers.values(), _GLANCE_S).not_done:
            glance()
    return {name: answer.result for name, answer in answers.items()}
