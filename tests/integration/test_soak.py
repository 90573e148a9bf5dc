# SPDX-License-Identifier: Apache-2.0
"""The soak objects to what grows; its other checks need an hour, or a few minutes."""

from __future__ import annotations

import pytest
from soak import MOST_GROWTH, Row, growths


def hour(leak: dict[str, float]) -> list[Row]:
    """Returns the rows of an hour, each learner of which lives for ten minutes or twenty.

    leak: MiB, threads or files per hour, by column; a learner in another's place begins anew.
    """
    rows: list[Row] = []
    for second in range(3600):
        learner = [1, 2, 3, 3, 4, 5][second // 600]
        age = second - [0, 600, 1200, 2400, 3000][learner - 1]
        mib = {
            "learner_mib": 0.0 if age < 5 else 272 + leak.get("learner_mib", 0) * age / 3600,
            "hosts_mib": (52 if age < 20 else 105) + leak.get("hosts_mib", 0) * second / 3600,
            "learner_threads": 40 + leak.get("learner_threads", 0) * age // 3600,
            "learner_files": 60 + leak.get("learner_files", 0) * age // 3600,
        }
        rows.append({"seconds": float(second), "learner": learner, **mib})
    return rows


def test_what_stays_is_accepted() -> None:
    assert max(growths(hour({})).values()) == 0


@pytest.mark.parametrize(
    ("column", "more", "whose"),
    [
        ("learner_mib", 60, "the learner that lived longest"),
        ("hosts_mib", 5, "the hosts"),
        ("learner_threads", 10, "its threads"),
        ("learner_files", 20, "its open files"),
    ],
)
def test_a_leak_is_refused_also_where_killed_programs_begin_anew(
    column: str, more: float, whose: str
) -> None:
    grown = growths(hour({column: more}))
    assert [name for name, share in grown.items() if share > MOST_GROWTH] == [whose]
