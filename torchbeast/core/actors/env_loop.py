# SPDX-License-Identifier: Apache-2.0
"""Acting in E environments, step by step; used by evaluation and MonoBeast's actors.

    loop = EnvLoop(env, actor, seed)
    while True:
        loop.row                 what the environments gave, [E, ...]
        loop.act("sample")       the next action, from that row and the recurrent state
        loop.step()              the next row

Stacks are rebuilt here, and episodes counted. E is the number of environments, and K the number of
environments that are truncated in one step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchbeast.core.actors.contract import Acted, Actor, Mode, ModelInputs, zeros_of
from torchbeast.core.base.computing import own_settings
from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.envs.contract import FinalInfo, VecStep, final_info_of
from torchbeast.core.envs.frame_stack import FrameStacker
from torchbeast.core.envs.spaces import ArrayNest
from torchbeast.core.envs.vec_env import VecEnv


class EnvRow(NamedTuple):
    """The outputs of E environments after an action, or at the start."""

    observation: ArrayNest  # leaves [E, ...], stacks included
    reward: np.ndarray  # float32 [E]
    done: np.ndarray  # bool [E] terminated or truncated; true at the start
    truncated: np.ndarray  # bool [E]
    episode_end: np.ndarray  # bool [E] the whole game is over
    episode_step: np.ndarray  # int32 [E] includes the last step where a game ended
    episode_return: np.ndarray  # float32 [E] includes the last reward where a game ended
    final_observation: ArrayNest | None  # leaves [K, ...], stacks included, of the truncated
    final_info: FinalInfo  # of the games that ended


class EnvLoop:
    """One actor in E environments.

    env: the environments.
    actor: the actor.
    row: what the environments gave last.
    acted: what the actor chose before that, an action of zeros at the start, and the state with
        which it will process `row`.
    """

    def __init__(self, env: VecEnv, actor: Actor, seed: int, first_env: int = 0) -> None:
        """first_env: number of the first environment, see Actor.env_index."""
        self.env = env
        self.actor = actor
        actor.env_index = torch.arange(first_env, first_env + env.num_envs, device="cpu")
        self._stacker = FrameStacker(env.frame_stack)
        self._episode_step = np.zeros(env.num_envs, np.int32)
        # float64, because a long sum of float32 stops growing
        self._episode_return = np.zeros(env.num_envs)
        observation = self._stacker.reset(env.reset(seed))
        no_reward, nothing = np.zeros(env.num_envs, np.float32), np.zeros(env.num_envs, bool)
        begins = VecStep(observation, no_reward, ~nothing, nothing, nothing, None)
        self.row = self._row(begins, final_info={})
        with own_settings():
            self.acted = initial_acted(actor, env.num_envs)

    def act(self, mode: Mode) -> None:
        """Chooses the next action and advances the recurrent state past the current row."""
        row = self.row
        inputs = inputs_of(row.observation, row.reward, row.done, self.acted.action)
        self.acted = self.actor.act(inputs, self.acted.state, mode)

    def step(self) -> int:
        """Executes the chosen action; returns the number of environments that took a step."""
        # Copies [1, E, ...] to [E, ...], since environments may write to their actions.
        action = map_leaves(lambda leaf: leaf[0].numpy().copy(), self.acted.action)
        step = self._stacker.stacked(self.env.step(action))
        taken = self._count(step)
        self.row = self._row(step, final_info_of(self.env))
        return taken

    def _row(self, step: VecStep, final_info: FinalInfo) -> EnvRow:
        """Returns the row of a step; its observations have stacks."""
        done = step.terminated | step.truncated
        steps = self._episode_step.copy()
        if step.resets is not None:
            steps[step.resets] = 0  # also within a game, so that is_reset recognises the row
        counts = steps, self._episode_return.astype(np.float32)
        ends = step.truncated, step.episode_end
        final = step.final_observation
        return EnvRow(step.observation, step.reward, done, *ends, *counts, final, final_info)

    def _count(self, step: VecStep) -> int:
        """Counts this step in the running games; returns how many took one."""
        over = self.row.episode_end
        self._episode_step[over] = 0
        self._episode_return[over] = 0
        self._episode_return += step.reward
        stepped = np.ones(len(over), bool) if step.resets is None else ~step.resets
        self._episode_step += stepped
        return int(np.count_nonzero(stepped))


def inputs_of(
    observation: ArrayNest, reward: np.ndarray, done: np.ndarray, last_action: Nest[Tensor]
) -> ModelInputs:
    """Returns the inputs of one step: arrays [E, ...], frames stacked, and actions [1, E, ...]."""
    rows = map_leaves(_one_step, observation), _one_step(reward), _one_step(done)
    return ModelInputs(*rows, last_action)


def initial_acted(actor: Actor, num_envs: int) -> Acted:
    """Returns an action of zeros and the initial state, from which the first action is chosen."""
    extras = zeros_of(actor.extra_specs, 1, num_envs)
    action = actor.distribution.zero_action((1, num_envs))
    return Acted(action, extras, actor.initial_state(num_envs))


def _one_step(array: np.ndarray) -> Any:
    """Returns a tensor [1, E, ...] of one time step; of a copy if the array is read-only."""
    return torch.from_numpy(array if array.flags.carray else np.array(array, order="C"))[None]
