# SPDX-License-Identifier: Apache-2.0
"""Times in the tables of docs/contributing/tested-faults.md are those of the code.

For times that no test waits for: they are too long, or a test shortens them. Others are asserted by
the tests that the page names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchbeast.collect import source
from torchbeast.fleets import supervisor
from torchbeast.fleets.waiting import STALL_S, WAIT_S
from torchbeast.run import learner_run
from torchbeast.servers import joining

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contributing" / "tested-faults.md").read_text(encoding="utf-8")
STATES = (ROOT / "docs" / "how-to" / "streams.svg").read_text(encoding="utf-8")


def by_default(name: str) -> float:
    """Returns the default of an argument of the actor pool."""
    stubs = (ROOT / "libtorchbeast" / "_C.pyi").read_text(encoding="utf-8")
    (found,) = re.findall(
        rf"\b{name}: float = ([\d.]+)", stubs.partition("class ActorPool")[2].partition("@final")[0]
    )
    return float(found)


# Seconds of the code, the number that is stated, how a row begins, and how it states it.
STATED = [
    (learner_run._JOIN_S, 15, "Ctrl-C, SIGTERM |", "at most 15 s and the time of a checkpoint"),
    (supervisor.SECOND_SIGNAL_S, 1, "a second signal, a second or more after", "exit code 130"),
    (
        supervisor._DEATHS_S,
        600,
        "MonoBeast: an actor process",
        "Five deaths in one place within ten",
    ),
    (supervisor._DEATHS_S, 600, "five servers die in one place", "within ten minutes"),
    (STALL_S, 60, "servers are slow to start", "once a minute"),
    (supervisor._PAUSE_S, 10, "a replacement cannot start", "after 10, 30 and 90 s"),
    (source._HANG_S, 600, "MonoBeast: an actor is in one step", "for ten minutes"),
    (STALL_S, 60, "MonoBeast: an actor is in one step", "after a minute"),
    (WAIT_S, 10, "no update for ten seconds", "once a minute"),
    (STALL_S, 60, "no update for ten seconds", "once a minute"),
    (by_default("reconnect_timeout_s"), 60, "fewer than `--min_streams`", "after a minute"),
    (by_default("step_timeout_s"), 600, "a step takes longer than ten minutes", "ten minutes |"),
    (joining._LONGEST_PAUSE_S + joining._CONNECT_S, 15, "a dialling host is", "at most 15 s"),
    (joining._LOOK_S, 0.5, "a dialling host comes later", "half a second"),
]


@pytest.mark.parametrize(("seconds", "stated", "row", "words"), STATED)
def test_a_stated_time_is_that_of_the_code(
    seconds: float, stated: float, row: str, words: str
) -> None:
    begin = "| " + row.removeprefix("| ")
    (found,) = [line for line in PAGE.splitlines() if line.startswith(begin)]
    assert words in found
    assert seconds == stated


@pytest.mark.parametrize(
    ("seconds", "stated", "words"),
    [
        (by_default("connect_timeout_s"), 60, "(1 min at the start"),
        (by_default("step_timeout_s"), 600, "step (10 min)"),
    ],
)
def test_a_time_in_the_picture_of_the_states_of_a_stream_is_that_of_the_code(
    seconds: float, stated: float, words: str
) -> None:
    assert words in STATES
    assert seconds == stated
