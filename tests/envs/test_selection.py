# SPDX-License-Identifier: Apache-2.0
"""`--observation_keys`: leaves of dict observations, selected where the environment runs."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from example_envs import Truncating

from torchbeast import envs
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.selection import leaf_keys, select
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import SelectedVecEnv, VecEnv
from torchbeast.envs import EnvOptions, EnvSpec

NESTED: Any = {
    "glyphs": 1,
    "inventory": {"glyphs": 2, "letters": {"upper": 3, "lower": 4}},
    "inventory/old": 5,
    "pair": (6, {"seven": 7}),
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], NESTED),
        (["glyphs"], {"glyphs": 1}),
        (["inventory"], {"inventory": NESTED["inventory"]}),
        (["inventory/glyphs"], {"inventory": {"glyphs": 2}}),
        (["inventory/letters/lower"], {"inventory": {"letters": {"lower": 4}}}),
        (["inventory/glyphs", "glyphs"], {"glyphs": 1, "inventory": {"glyphs": 2}}),
        (["glyphs/upper", "pair/seven", "inventory/gly"], {}),
        (["inventory/old"], {"inventory/old": 5}),
        (["pair"], {"pair": NESTED["pair"]}),
        (["inventory", "inventory/glyphs"], {"inventory": NESTED["inventory"]}),
    ],
)
def test_selected_leaves_keep_their_place(keys: list[str], expected: Any) -> None:
    assert select(NESTED, keys) == expected


def test_all_names_together_select_everything() -> None:
    found = leaf_keys(NESTED)
    assert found == [
        "glyphs",
        "inventory/glyphs",
        "inventory/letters/upper",
        "inventory/letters/lower",
        "inventory/old",
        "pair",
    ]
    assert select(NESTED, found) == NESTED


def test_an_observation_that_is_no_dict_has_no_names_and_stays_unchanged() -> None:
    assert leaf_keys(3) == leaf_keys((1, 2)) == []
    assert select((1, 2), ["glyphs"]) == (1, 2)


class Rich(Truncating):
    """An environment with a string, arrays at two depths, and one whose shape changes."""

    def observation(self) -> Any:
        grid = np.full((2, 3), self.time, np.uint8)
        changing = np.zeros(self.time)
        return {"mission": "go", "a": np.float32(self.time), "b": {"grid": grid, "odd": changing}}


def rich() -> Rich:
    return Rich()


def rich_vector(num_envs: int) -> VecEnv:
    """A user's own vector environment, whose leaves can all be sent."""
    return SyncVecEnv([Rich] * num_envs, "rich", ["a", "b/grid"])


def test_only_selected_leaves_are_checked() -> None:
    env = SyncVecEnv([Rich, Rich], "rich", ["a", "b/grid"])
    space = map_leaves(lambda leaf: (leaf.dtype, len(leaf.shape)), env.observation_space)
    assert space == {"a": ("float32", 0), "b": {"grid": ("uint8", 2)}}
    assert env.reset(0)["b"]["grid"].shape == (2, 2, 3)
    for time in (1, 2, 3, 4):
        step = env.step(np.zeros(2, np.int64))
        assert step.observation["a"].tolist() == [time % 4] * 2
    assert set(step.final_observation) == {"a", "b"}
    assert step.final_observation["b"]["grid"].tolist() == np.full((2, 2, 3), 4).tolist()


def selecting(env_id: str, *keys: str) -> EnvSpec:
    return EnvSpec(env_id, options=EnvOptions(observation_keys=keys))


@pytest.mark.parametrize("factory", ["rich", "rich_vector"])
def test_selection_works_for_both_kinds_of_factory(factory: str) -> None:
    env = envs.make(selecting(f"{__name__}:{factory}", "b/grid"), 3)
    assert list(env.observation_space) == ["b"] and list(env.observation_space["b"]) == ["grid"]
    for observation in (env.reset(1), env.step(np.zeros(3, np.int64)).observation):
        assert leaf_keys(observation) == ["b/grid"]
    for _ in range(3):
        step = env.step(np.zeros(3, np.int64))
    assert leaf_keys(step.final_observation) == ["b/grid"] and step.truncated.all()
    env.close()


def test_selection_works_for_a_gymnasium_environment() -> None:
    pytest.importorskip("minigrid")
    env = envs.make(selecting("minigrid:MiniGrid-Empty-5x5-v0", "image"), 1)
    assert leaf_keys(env.observation_space) == ["image"]


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["aa"], r"observations have no 'aa'; did you mean a\? choose from "),
        (["a", "b/gird"], r"have no 'b/gird'; did you mean b/grid\? choose from"),
        (["xyz"], r"have no 'xyz'; choose from (mission )?a b/grid"),
        (["a/b"], r"have no 'a/b'"),
    ],
)
def test_a_wrong_key_is_refused_with_the_existing_ones(
    vector: bool, keys: list[str], sentence: str
) -> None:
    factory = "rich_vector" if vector else "rich"
    with pytest.raises(ValueError, match=sentence):
        envs.make(selecting(f"{__name__}:{factory}", *keys), 1)


@pytest.mark.parametrize("env_id", ["Catch", "CartPole-v1"])
def test_a_selection_from_an_observation_that_is_no_dict_is_refused(env_id: str) -> None:
    with pytest.raises(ValueError, match=rf"{env_id}: .* not a dict.* remove observation_keys"):
        envs.make(selecting(env_id, "image"), 1)


def test_a_string_leaf_is_refused_with_the_flag_that_leaves_it_out() -> None:
    with pytest.raises(ValueError) as error:
        SyncVecEnv([Rich], "rich")
    assert "observation['mission'] has dtype <U2, which cannot be sent" in str(error.value)
    assert str(error.value).endswith("or leave the entry out with observation_keys")


def test_options_go_through_json_and_flags() -> None:
    options = EnvOptions(observation_keys=("a", "b"))
    assert EnvOptions.of(vars(options)) == options
    assert EnvOptions.of({"env": "Catch", "observation_keys": ["a", "b"], "seed": 1}) == options
    assert EnvOptions.of({}) == EnvOptions()


def test_closing_a_selection_closes_its_environment() -> None:
    inner = SyncVecEnv([Rich], "rich", ["a", "b/grid"])
    SelectedVecEnv(inner, ["a"]).close()
    assert inner._envs[0].closed


def test_selection_works_for_a_vector_environment_of_gymnasium() -> None:
    pytest.importorskip("minigrid")
    kwargs = {"id": "minigrid:MiniGrid-Empty-5x5-v0", "vectorization_mode": "sync"}
    options = EnvOptions(observation_keys=("image",))
    with closing(envs.make(EnvSpec("gymnasium:make_vec", kwargs, options=options), 2)) as env:
        assert leaf_keys(env.observation_space) == leaf_keys(env.reset(1)) == ["image"]
