# SPDX-License-Identifier: Apache-2.0
"""Algorithms are found by name, and a name that is wrong is a sentence."""

from __future__ import annotations

import dataclasses

import pytest

from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.laser import LASER
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.algos.registry import ALGOS, config_of, find_algorithm
from torchbeast.core.base.specs import SpecError


class Mine(IMPALA):
    """A user's."""


def nothing() -> None:
    """Is no algorithm."""


def test_every_registered_algorithm_is_found_and_has_a_config_of_defaults() -> None:
    assert (
        find_algorithm("impala") is IMPALA
        and find_algorithm("laser") is LASER
        and find_algorithm("ppo") is PPO
    )
    for name in ALGOS:
        assert dataclasses.is_dataclass(find_algorithm(name).Config())
        assert config_of(name) is find_algorithm(name).Config


def test_a_users_algorithm_is_found_by_module_and_name() -> None:
    assert find_algorithm(f"{__name__}:Mine") is Mine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "impalla",
            "no algorithm 'impalla': use impala, laser, ppo, pqn, dqn, sac, r2d2, td3, or "
            "my_module:MyAlgo; did",
        ),
        ("no_such_module:Mine", "no_such_module:Mine: there is no module no_such_module"),
        (f"{__name__}:Other", "the module .* has no 'Other'"),
        (f"{__name__}:nothing", "must be a subclass of torchbeast.core.algos.base"),
        ("builtins:int", "builtins:int is not an algorithm"),
    ],
)
def test_a_wrong_name_is_a_sentence(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find_algorithm(name)
