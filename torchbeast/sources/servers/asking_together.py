# SPDX-License-Identifier: Apache-2.0
"""Asks many hosts at the same time, so that one that does not answer holds up no other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from torchbeast.sources.servers.discovery import Host

_MOST = 64  # at once; each takes a thread and a connection


def asked_together(
    describe: Callable[[str], Host], names: Collection[str]
) -> dict[str, Callable[[], Host]]:
    """Describes hosts, each in a thread of its own; returns when the last one has answered or not.

    describe: returns the host of a name, or raises, within a time of its own, which ends the wait.
    It is called by many threads at once.

    Returns, for each name in the same order, what `describe` did: the result returns the host or
    raises the error.
    """
    if not names:
        return {}
    with ThreadPoolExecutor(min(len(names), _MOST)) as threads:
        answers = {name: threads.submit(describe, name) for name in names}
    return {name: answer.result for name, answer in answers.items()}
