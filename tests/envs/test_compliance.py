# SPDX-License-Identifier: Apache-2.0
"""The compliance suite for the environments that come with TorchBeast."""

from __future__ import annotations

import pytest
from compliance.vec_env import VecEnvCompliance

from torchbeast import envs
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.atari import AtariEnv
from torchbeast.envs.toy import Mock


class TestMock(VecEnvCompliance):
    num_steps = 10

    def make(self, num_envs: int) -> VecEnv:
        return Mock(num_envs, episode_length=4)


class TestCatch(VecEnvCompliance):
    num_steps = 50

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Catch", num_envs)


class TestMemory(VecEnvCompliance):
    num_steps = 50

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Memory", num_envs)


class TestDials(VecEnvCompliance):
    num_steps = 50

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Dials", num_envs)


class TestBitFlip(VecEnvCompliance):
    num_steps = 50

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("BitFlip", num_envs)


class TestCartPole(VecEnvCompliance):
    num_steps = 60

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("CartPole-v1", num_envs)


class TestMakeVec(VecEnvCompliance):
    num_steps = 60

    def make(self, num_envs: int) -> VecEnv:
        kwargs = {"id": "CartPole-v1", "vectorization_mode": "sync"}
        return envs.make(envs.EnvSpec("gymnasium:make_vec", kwargs), num_envs)


class TestMakeVecThatBeginsLate(VecEnvCompliance):
    num_steps = 60

    def make(self, num_envs: int) -> VecEnv:
        return envs.make(envs.EnvSpec("gymnasium:make_vec", {"id": "CartPole-v1"}), num_envs)


class TestTwoTasks(VecEnvCompliance):
    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Catch,tasks_by_hand:late_catch", num_envs)


class TestMinAtarBreakout(VecEnvCompliance):
    num_steps = 60

    def make(self, num_envs: int) -> VecEnv:
        pytest.importorskip("minatar")
        return envs.make("MinAtar/Breakout-v1", num_envs)


class TestPendulumWithContinuousActionsAndATimeLimit(VecEnvCompliance):
    num_steps = 210

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Pendulum-v1", num_envs)


@pytest.mark.long
class TestBreakout(VecEnvCompliance):
    num_steps = 30  # the first life is lost in step 22 or so

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("BreakoutNoFrameskip-v4", num_envs)


class TestPongThatIsCutShort(VecEnvCompliance):
    num_steps = 22  # a game ends in step 20

    def make(self, num_envs: int) -> VecEnv:
        return AtariEnv("pong", num_envs, max_frames=80)


class TestDictObservationsOfALegacyEnvironment(VecEnvCompliance):
    num_steps = 30

    def make(self, num_envs: int) -> VecEnv:
        from example_envs import LegacyDict

        return SyncVecEnv([LegacyDict] * num_envs, "LegacyDict")


class TestEnvPoolCartPole(VecEnvCompliance):
    num_steps = 60

    def make(self, num_envs: int) -> VecEnv:
        return envpool_env("CartPole-v1", num_envs)


@pytest.mark.long
class TestEnvPoolPong(VecEnvCompliance):
    num_steps = 30

    def make(self, num_envs: int) -> VecEnv:
        return envpool_env("Pong-v5", num_envs, max_episode_steps=20)


class TestEnvPoolHalfCheetah(VecEnvCompliance):
    num_steps = 30

    def make(self, num_envs: int) -> VecEnv:
        return envpool_env("HalfCheetah-v4", num_envs, max_episode_steps=20)


def envpool_env(task: str, num_envs: int, **kwargs: int) -> VecEnv:
    pytest.importorskip("envpool")
    return envs.make(envs.EnvSpec(f"envpool:{task}", kwargs), num_envs)
