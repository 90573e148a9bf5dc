# SPDX-License-Identifier: Apache-2.0
"""The settings that a sweep draws."""

from __future__ import annotations

import numpy as np
import pytest

from torchbeast.errors import UsageError
from torchbeast.sweep.search import Search, settings_of_agents, values_of


def drawn(*words: str, trials: int | None = 64, search: Search = "sobol") -> list[dict[str, str]]:
    return settings_of_agents(values_of(words), trials, search)


@pytest.mark.parametrize("search", ["sobol", "random"])
def test_a_positive_range_is_drawn_on_a_logarithmic_scale(search: Search) -> None:
    found = [
        float(each["learning_rate"]) for each in drawn("learning_rate=0.0001:0.01", search=search)
    ]
    assert len(found) == 64 and min(found) >= 0.0001 and max(found) <= 0.01
    assert 0.3 < np.mean(np.array(found) < 0.001) < 0.7  # the middle of the two decades
    assert min(found) < 0.0002 and max(found) > 0.005


def test_other_ranges_are_drawn_on_a_linear_scale() -> None:
    found = [float(each["discounting"]) for each in drawn("discounting=0:1")]
    assert set(found) == {0.0, 1.0}  # whole numbers
    found = [float(each["discounting"]) for each in drawn("discounting=0.0:1.0")]
    np.testing.assert_allclose(np.mean(found), 0.5, atol=0.02)


def test_a_range_of_whole_numbers_gives_all_of_them_and_no_others() -> None:
    found = {each["n_step"] for each in drawn("n_step=1:4")}
    assert found == {"1", "2", "3", "4"}


def test_sobol_points_are_spread_more_evenly_than_random_ones() -> None:
    """Each cell of a grid of 4 x 4 should have 4 of the 64 points."""

    def uneven(search: Search) -> float:
        found = drawn("a=0.0:1.0", "b=0.0:1.0", search=search)
        counts = np.histogram2d(*[[float(x[k]) for x in found] for k in "ab"], bins=(4, 4))[0]
        return float(counts.std())

    assert uneven("sobol") < 0.8 < uneven("random")


def test_every_trial_is_trained_with_every_seed() -> None:
    found = drawn("learning_rate=0.1:0.2", "seed=1,2,3", trials=5)
    rates = {each["learning_rate"] for each in found}
    assert len(rates) == 5 and len(found) == 15
    for rate in rates:
        assert [x["seed"] for x in found if x["learning_rate"] == rate] == ["1", "2", "3"]


def test_lists_are_drawn_from_too_and_no_setting_is_drawn_twice() -> None:
    found = drawn("use_lstm=true,false", "model=mlp,small", trials=30)
    assert len(found) == 4 and {each["model"] for each in found} == {"mlp", "small"}


def test_a_sweep_that_continues_draws_the_same_settings() -> None:
    assert drawn("a=0.1:1.0", "b=1,2,3") == drawn("a=0.1:1.0", "b=1,2,3")


@pytest.mark.parametrize(
    ("word", "trials", "message"),
    [
        ("learning_rate=0.1:1", None, "is a range: add --trials"),
        ("learning_rate=1:0.1", 4, "the range 1:0.1 must be LOW:HIGH"),
        ("learning_rate=1:inf", 4, "must be LOW:HIGH"),
    ],
)
def test_a_range_that_cannot_be_drawn_from_is_refused(
    word: str, trials: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        drawn(word, trials=trials)


def test_a_name_with_a_colon_is_no_range() -> None:
    assert drawn("env=my_module:make_env", trials=None) == [{"env": "my_module:make_env"}]


@pytest.mark.parametrize("word", ["seed=1,2", "seed=1:100"])
def test_trials_without_a_setting_to_draw_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--trials 8 draws settings, but --set has only seed"):
        drawn(word, trials=8)


def test_a_narrow_range_gives_many_values_and_none_outside() -> None:
    found = [float(each["discounting"]) for each in drawn("discounting=0.999:0.99999")]
    assert len({*found}) > 60
    assert min(found) >= 0.999 and max(found) < 1
