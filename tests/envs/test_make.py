# SPDX-License-Identifier: Apache-2.0
"""Environments by name: names that are found, and the message for each one that is not."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from example_envs import Counting

import torchbeast
from torchbeast import envs
from torchbeast.core.envs.spaces import Discrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.envs import EnvError, EnvSpec, atari, make_vec, spec
from torchbeast.envs.spec import is_atari

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "env_id", ["BitFlip", "Mock", "Catch", "Dials", "Memory", "CartPole-v1", "FrozenLake-v1"]
)
def test_every_name_makes_the_requested_number_of_environments(env_id: str) -> None:
    env = envs.make(env_id, 3)
    assert env.num_envs == 3 and env.env_id == env_id
    env.close()


def test_without_a_number_there_is_one_environment() -> None:
    assert torchbeast.make_env("CartPole-v1").num_envs == 1


def test_a_factory_is_called_once_for_each_environment() -> None:
    env = envs.make("example_envs:Counting", 3)
    assert isinstance(env, SyncVecEnv)
    assert len({id(one) for one in env._envs if isinstance(one, Counting)}) == 3


def test_a_factory_of_num_envs_returns_the_vector_environment() -> None:
    env = envs.make("example_envs:vector", 5)
    assert env.num_envs == 5 and env.env_id == "Mock"


def test_a_gymnasium_id_may_name_the_module_to_import() -> None:
    env = envs.make("gymnasium:CartPole-v1", 1)
    assert env.num_envs == 1


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("Cathc", "unknown environment Cathc; did you mean Catch"),
        ("CartPol-v1", "did you mean CartPole-v1"),
        ("torchbeast.envs.toy.Catch", "unknown .* for a function my_module:make_env$"),
        ("CartPole-v9", "unknown environment CartPole-v9; did you mean CartPole-v1"),
        ("!", "!: Malformed environment ID"),
        ("", "Malformed environment ID"),
        ("ALE/Pogn-v5", "ALE has no game called Pogn; did you mean Pong"),
        ("PnogNoFrameskip-v4", "ALE has no game called Pnog; did you mean Pong"),
        ("ALE/Pong-ram-v5", "Atari name such as ALE/Pong-v5"),
        ("Xyzzy-Quux-v0", "another package use package:Xyzzy-Quux-v0, for"),
        ("no_such_module:make", "there is no module no_such_module; install it"),
        ("no_such_module:Thing-v0", "there is no module no_such_module; install it"),
        ("example_envs:vectro", "the module example_envs has no 'vectro'; did you mean vector"),
        ("example_envs:not_callable", "not_callable is 3, expected a function or class"),
        ("example_envs:lying_vector", "called with num_envs=2, .* got .* with num_envs=3"),
        (":make", "'' is not the name of a module"),
        (".relative:make", "'.relative' is not the name of a module"),
    ],
)
def test_an_unknown_name_is_refused_in_one_sentence(env_id: str, sentence: str) -> None:
    with pytest.raises(envs.EnvError, match=sentence) as raised:
        envs.make(env_id, 2)
    assert "\n" not in str(raised.value)


def test_the_package_of_a_known_family_is_imported_without_being_named() -> None:
    pytest.importorskip("minigrid")
    options = envs.EnvOptions(observation_keys=("image",))
    assert envs.make(envs.EnvSpec("MiniGrid-Empty-5x5-v0", options=options), 1).num_envs == 1


@pytest.mark.parametrize(
    ("env_id", "package"),
    [
        ("MiniHack-River-v0", "minihack, which is not installed: pip install minihack"),
        ("NetHackLore-v9", r"nle, which is not installed: pip install 'torchbeast\[nethack\]'"),
        ("nle:NetHackLore-v9", r"nle, which .* pip install 'torchbeast\[nethack\]'"),
    ],
)
def test_without_the_package_of_a_known_family_its_ids_say_what_to_install(
    env_id: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    with pytest.raises(envs.EnvError, match=f"^{env_id} needs {package}$"):
        envs.make(env_id, 1)


OF_ATARI = {"sticky_actions": 0.1, "frame_skip": 4, "full_action_space": True}


@pytest.mark.parametrize(
    ("env_id", "option"),
    [
        *[("Catch", option) for option in OF_ATARI],
        ("Mock", "frame_skip"),
        ("CartPole-v1", "frame_skip"),
        ("MinAtar/Breakout-v1", "sticky_actions"),
        ("example_envs:vector", "full_action_space"),
    ],
)
def test_options_of_atari_games_are_refused_for_others(env_id: str, option: str) -> None:
    options = envs.EnvOptions(**{option: OF_ATARI[option]})
    with pytest.raises(envs.EnvError, match=rf"{option} needs an Atari game, and {env_id} is not"):
        envs.make(envs.EnvSpec(env_id, options=options), 1)


def test_zero_environments_are_refused() -> None:
    with pytest.raises(envs.EnvError, match="at least one environment is needed, got num_envs=0"):
        envs.make("Catch", 0)


def test_an_error_inside_a_users_module_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        envs.make("broken_module:make", 1)


@pytest.mark.parametrize(
    ("env_id", "rom"),
    [
        ("PongNoFrameskip-v4", "pong"),
        ("PongDeterministic-v0", "pong"),
        ("Pong-v4", "pong"),
        ("ALE/Pong-v5", "pong"),
        ("MsPacmanNoFrameskip-v4", "ms_pacman"),
        ("ALE/UpNDown-v5", "up_n_down"),
        ("ALE/TicTacToe3D-v5", "tic_tac_toe_3d"),
    ],
)
def test_atari_ids_of_every_spelling_name_their_rom(env_id: str, rom: str) -> None:
    assert is_atari(env_id)
    assert atari.rom_name(env_id) == rom


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1", "Ant-v4", "HalfCheetah-v4"])
def test_other_gymnasium_ids_are_not_taken_for_atari(env_id: str) -> None:
    assert not is_atari(env_id)


def test_without_ale_an_atari_id_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    with pytest.raises(envs.EnvError, match="pip install ale-py"):
        envs.make("PongNoFrameskip-v4", 1)


def test_without_gymnasium_its_ids_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(envs.EnvError, match="there is no module gymnasium; install it"):
        envs.make("CartPole-v1", 1)


def test_a_missing_package_of_an_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError("No module named 'box2d'")

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(envs.EnvError, match=r"CartPole-v1 needs a package .* 'gymnasium\[classic_"):
        envs.make("CartPole-v1", 1)


def test_an_id_without_its_version_is_refused_with_the_latest_one() -> None:
    with pytest.raises(envs.EnvError, match="LunarLander has no version: use .*-v3"):
        envs.make("LunarLander", 1)


STEP_WITHOUT_TORCH = """
import sys
import numpy as np
from torchbeast import envs
import torchbeast.core.envs.frame_stack
env = envs.make(sys.argv[1], 2)
env.reset(0)
env.step(np.zeros(2, np.int64))
unwanted = [name for name in sys.argv[2:] if name in sys.modules]
assert not unwanted, unwanted
"""


@pytest.mark.parametrize(
    ("env_id", "unwanted"),
    [
        ("Catch", ["torch", "gymnasium", "ale_py", "cv2"]),
        ("Mock", ["torch", "gymnasium", "ale_py", "cv2"]),
        ("CartPole-v1", ["torch", "ale_py", "cv2"]),
        ("PongNoFrameskip-v4", ["torch", "cv2"]),
        ("example_envs:Counting", ["torch", "ale_py"]),
    ],
)
def test_an_environment_process_imports_only_what_it_needs(
    env_id: str, unwanted: list[str]
) -> None:
    path = f"{REPOSITORY}:{Path(__file__).parent}"
    command = [sys.executable, "-c", STEP_WITHOUT_TORCH, env_id, *unwanted]
    result = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_environments_for_a_scheme_are_made_from_a_name_a_spec_or_a_function() -> None:
    named = make_vec("CartPole-v1", 3, max_episode_steps=7)
    described = make_vec(EnvSpec("CartPole-v1"), 3, max_episode_steps=7)
    own = make_vec(gymnasium.make, 3, id="CartPole-v1", max_episode_steps=7)
    for factory in (named, described, own):
        assert factory.action_space == Discrete(2) and factory.vec_env_size == 3
        with closing(factory()) as env:
            env.reset(seed=1)
            steps = [env.step(np.array([0, 1, number % 2])) for number in range(7)]
        assert env.num_envs == 3 and any(step.truncated[2] for step in steps)


def test_environments_that_cannot_be_made_are_refused_at_once() -> None:
    with pytest.raises(EnvError, match="CartPole-v1: .*'lenght'; it takes .*, got lenght=7"):
        make_vec("CartPole-v1", 3, lenght=7)
    with pytest.raises(ValueError, match="vec_env_size must be at least 1, got 0"):
        make_vec("CartPole-v1", 0)


def test_the_threads_that_step_environments_do_not_say_which_they_are() -> None:
    kwargs = {"env": "Catch", "num_threads": 2, "render": False}
    assert envs.spec_of(envs.make, kwargs) == EnvSpec("Catch")


def test_a_class_of_a_script_may_have_the_name_of_a_built_in_environment() -> None:
    pytest.importorskip("cloudpickle")
    own = type("Catch", (Counting,), {"__module__": "__main__"})
    assert isinstance(envs.make(EnvSpec.of(own), 2), SyncVecEnv)


def test_an_environment_in_place_of_a_function_is_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match="give a function, such as lambda"):
        make_vec(gymnasium.make("CartPole-v1"))  # type: ignore[arg-type]
