# SPDX-License-Identifier: Apache-2.0
"""The environments that come with TorchBeast, all through the same suite."""

from __future__ import annotations

from compliance.vec_env import VecEnvCompliance

from torchbeast import envs
from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv
from torchbeast.envs.atari import AtariEnv


class TestMock(VecEnvCompliance):
    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Mock", num_envs)


class TestCatch(VecEnvCompliance):
    num_steps = 50

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Catch", num_envs)


class TestMemory(VecEnvCompliance):
    num_steps = 50

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Memory", num_envs)


class TestCartPole(VecEnvCompliance):
    def make(self, num_envs: int) -> VecEnv:
        return envs.make("CartPole-v1", num_envs)


class TestPendulumWithContinuousActionsAndATimeLimit(VecEnvCompliance):
    def make(self, num_envs: int) -> VecEnv:
        return envs.make("Pendulum-v1", num_envs)


class TestBreakout(VecEnvCompliance):
    num_steps = 40

    def make(self, num_envs: int) -> VecEnv:
        return envs.make("BreakoutNoFrameskip-v4", num_envs)


class TestPongThatIsCutShort(VecEnvCompliance):
    num_steps = 30

    def make(self, num_envs: int) -> VecEnv:
        return AtariEnv("pong", num_envs, max_frames=80)


class TestDictObservationsOfALegacyEnvironment(VecEnvCompliance):
    num_steps = 30

    def make(self, num_envs: int) -> VecEnv:
        from example_envs import LegacyDict

        return SyncVecEnv([LegacyDict] * num_envs, "LegacyDict")
