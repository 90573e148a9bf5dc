# SPDX-License-Identifier: Apache-2.0
"""Asynchronous successive halving, on returns whose ranks are known."""

from __future__ import annotations

import math

import pytest

from torchbeast.sweep.runner import Asha


def test_of_those_that_came_as_far_before_an_agent_must_be_in_the_best_third() -> None:
    """The border is between the sixth and the seventh of ten, at 6 of 0, 1, ... 9."""
    for mean_return, ends in ((5.9, True), (6.1, False), (9.0, False), (-1.0, True)):
        asha = Asha(2700)
        for earlier in range(10):
            asha.ends(f"earlier {earlier}", 100, float(earlier))
        assert asha.ends("one", 100, mean_return) == ends


@pytest.mark.parametrize(("step", "is_compared"), [(99, False), (100, True), (299, True)])
@pytest.mark.parametrize("rung", [1, 3, 9])
def test_agents_are_compared_at_a_27th_a_9th_and_a_third_of_the_steps(
    rung: int, step: int, is_compared: bool
) -> None:
    asha = Asha(2700)
    assert not asha.ends("first", rung * 100, 1.0), "it has nobody to be compared with"
    assert asha.ends("second", rung * step, 0.0) == is_compared


def test_an_agent_is_compared_once_at_a_rung_and_only_after_an_episode_has_ended() -> None:
    asha = Asha(2700)
    asha.ends("first", 100, 1.0)
    assert not asha.ends("second", 100, math.nan)
    assert not asha.ends("second", 110, 2.0)
    assert not asha.ends("second", 120, 0.0), "it was compared at this rung already"
    asha.ends("first", 300, 3.0)
    assert asha.ends("second", 300, 2.0)


def test_agents_that_came_less_far_do_not_count() -> None:
    asha = Asha(2700)
    asha.ends("first", 100, 5.0)
    assert not asha.ends("second", 300, 0.0)


def test_few_steps_have_a_first_rung_all_the_same() -> None:
    asha = Asha(5)
    assert not asha.ends("first", 0, 1.0)
    asha.ends("first", 1, 1.0)
    assert asha.ends("second", 2, 0.0)
