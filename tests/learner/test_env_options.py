# SPDX-License-Identifier: Apache-2.0
"""Options that a learner gives reach every environment at its next reset, wherever it is."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from later import later
from small_schemes import impala_of, off_policy_of, scheme_of

from torchbeast import Learner, UsageError, make_env
from torchbeast.learner import Callback, RunningLearner
from torchbeast.run import checkpoint as checkpoints


class Levels(gymnasium.Env):
    """Episodes of two steps, each with the level as its reward; a reset with options sets it."""

    observation_space: ClassVar = spaces.Box(-10, 10, (1,), np.float32)
    action_space: ClassVar = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.level, self.time = float((options or {}).get("level", 0)), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self._seen(), self.level, self.time == 2, False, {}

    def _seen(self) -> Any:
        return np.array([self.level], np.float32)


class NoOptions(Levels):
    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


ENVS = {"env_fn": Levels, "vec_env_size": 2}
ASYNCHRONOUS = {"col_remote_workers": 1, "col_communication": "asynchronous"}


def settles_at(learner: Learner, mean_return: float) -> bool:
    """Returns whether all games come to have this return, however late a worker hears of it."""
    for _ in range(2_000):
        if learner.step()["mean_episode_return"] == mean_return:
            break
    after = {learner.step()["mean_episode_return"] for _ in range(12)}
    return {each for each in after if not np.isnan(each)} == {mean_return}


@pytest.mark.parametrize(
    ("make_scheme", "axes"),
    [
        (scheme_of, {}),
        later(scheme_of, {"col_remote_workers": 2}),
        (impala_of, ASYNCHRONOUS),
        (impala_of, {**ASYNCHRONOUS, "inference": "central"}),
        (off_policy_of, {}),
    ],
)
def test_options_reach_all_environments_at_their_next_resets(
    make_scheme: Any, axes: dict[str, Any], tmp_path: Path
) -> None:
    if axes.get("inference") == "central":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    with Learner(make_scheme(envs=ENVS, **axes), 10**6, tmp_path / "run", seed=1) as learner:
        learner.set_env_options({"level": 1})  # before the first environment is made
        assert settles_at(learner, 2.0)
        assert learner.get_metrics()["mean_return"] == 2.0, "in every game"
        learner.set_env_options({"level": 3})
        assert settles_at(learner, 6.0)
        learner.set_env_options({})
        assert settles_at(learner, 0.0)
        learner.set_env_options({"level": 2})
        learner.step()
        learner.save_model()
        learner.restore()
        assert settles_at(learner, 4.0), "environments that are made again"
        assert set(learner.evaluate(2).returns) == {0.0}
        learner.stop()


def test_a_resumed_run_keeps_its_options_until_it_gets_others(tmp_path: Path) -> None:
    def learner() -> Learner:
        return Learner(scheme_of(envs=ENVS), 10**6, tmp_path / "run", seed=1)

    with learner() as first:
        first.set_env_options({"level": 3})
        first.step()
    with learner() as second:
        assert settles_at(second, 6.0)
    with learner() as third:
        third.set_env_options({})
        assert settles_at(third, 0.0)


def test_a_run_that_goes_back_has_the_options_of_then(tmp_path: Path) -> None:
    with Learner(scheme_of(envs=ENVS), 10**6, tmp_path / "run", seed=1) as learner:
        learner.step()
        learner.save_model()
        learner.set_env_options({"level": 3})
        assert settles_at(learner, 6.0)
        learner.restore()
        assert settles_at(learner, 0.0)


def test_a_callback_can_raise_the_level(tmp_path: Path) -> None:
    class Curriculum(Callback):
        def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
            learner.set_env_options({"level": learner.steps // 200})

    scheme = scheme_of(envs=ENVS)
    with Learner(scheme, 1000, tmp_path / "run", callbacks=[Curriculum()]) as learner:
        assert learner.train()["mean_episode_return"] == 2 * 4


def test_an_episode_that_has_begun_keeps_its_options() -> None:
    env = make_env(f"{__name__}:Levels", 1)
    assert env.reset(1) == 0.0
    env.set_options({"level": 5})  # type: ignore[attr-defined]
    assert env.step(np.array([0])).reward == 0.0
    assert env.step(np.array([0])).observation == 5.0  # of the next episode
    assert env.step(np.array([0])).reward == 5.0


@pytest.mark.parametrize("axes", [{}, {"col_remote_workers": 1}])
def test_an_environment_without_options_ends_the_run(axes: dict[str, Any], tmp_path: Path) -> None:
    envs = {"env_fn": NoOptions, "vec_env_size": 2}
    with (
        pytest.raises(UsageError, match="NoOptions takes no options: add"),
        Learner(scheme_of(envs=envs, **axes), 10**6, tmp_path / "run") as learner,
    ):
        learner.set_env_options({"level": 1})
        for _ in range(1000):
            learner.step()


def test_options_that_cannot_be_sent_are_refused(tmp_path: Path) -> None:
    with Learner(scheme_of(envs=ENVS), 100, tmp_path / "run") as learner:
        with pytest.raises(TypeError, match="not JSON serializable"):
            learner.set_env_options({"level": {1, 2}})
        learner.stop()


def test_gradient_workers_do_not_pass_options_on(tmp_path: Path) -> None:
    with Learner(scheme_of(envs=ENVS, grad_remote_workers=1), 100, tmp_path / "run") as learner:
        with pytest.raises(UsageError, match="use a scheme without grad_remote_workers"):
            learner.set_env_options({"level": 1})
        learner.step()
    assert "env_options" not in checkpoints.load(tmp_path / "run" / "model.tar")


@pytest.mark.parametrize("env_id", ["Catch", "MinAtar/Breakout-v1"])
def test_an_environment_of_another_interface_says_that_it_takes_none(
    env_id: str, tmp_path: Path
) -> None:
    envs = {"env_fn": make_env, "env_kwargs": {"env": env_id}, "vec_env_size": 2}
    with Learner(scheme_of(envs=envs), 100, tmp_path / "run") as learner:
        learner.set_env_options({"level": 1})
        with pytest.raises(UsageError, match=f"{env_id} takes no options: only"):
            learner.step()


class Level(enum.IntEnum):
    HARD = 3


def test_options_are_kept_as_json_has_them(tmp_path: Path) -> None:
    with Learner(scheme_of(envs=ENVS), 10**6, tmp_path / "run") as learner:
        learner.set_env_options({"level": Level.HARD})
        learner.step()
    assert checkpoints.load(tmp_path / "run" / "model.tar")["env_options"] == {"level": 3}
