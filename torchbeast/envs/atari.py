# SPDX-License-Identifier: Apache-2.0
"""Atari games, stepped by ALE's own vector environment in C++.

docs/how-to/atari.md lists the preprocessing and how it differs from the original's wrappers.
E is the number of environments, K the number of those truncated in one step.
"""

from __future__ import annotations

import numpy as np

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.envs.contract import OwnVecEnv, VecStep
from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, Discrete
from torchbeast.core.envs.sync_vec_env import check_actions, environment_seeds
from torchbeast.envs.spec import ATARI_ID, EnvError, EnvSpec, need, roms_of_ale

# Thirty minutes of play at 60 frames a second, the usual limit of an episode in the literature.
MAX_FRAMES_PER_EPISODE = 108_000

_FRAME_SKIP = 4


class AtariEnv(OwnVecEnv):
    """E games of one kind, in gray frames of 84x84.

    Observations hold only the new frame, uint8 [E, 1, 84, 84]; the policy sees the newest four.
    terminated is true when a life or the game is lost, episode_end when the whole game is over.
    Rewards are the game's own, not clipped.
    """

    frame_stack = 4

    def __init__(
        self,
        rom: str,
        num_envs: int,
        *,
        env_id: str = "",
        num_threads: int = 1,
        noop_max: int = 30,
        max_frames: int = MAX_FRAMES_PER_EPISODE,
        sticky_actions: float = 0.0,
        frame_skip: int = _FRAME_SKIP,
        full_action_space: bool = False,
    ) -> None:
        """Makes the games.

        rom: ALE's name of the game, such as ms_pacman.
        noop_max: a game starts with a random number of no-op frames below this.
        max_frames: emulated frames after which an episode is truncated.
        sticky_actions: probability, at each emulated frame, of repeating the previous action.
        frame_skip: emulated frames per action; observed is the maximum of the last two.
        full_action_space: all 18 actions of the console instead of the ones that the game uses.
        """
        from ale_py.vector_env import AtariVectorEnv

        self._env = AtariVectorEnv(
            rom,
            num_envs,
            num_threads=num_threads,
            max_num_frames_per_episode=max_frames,
            repeat_action_probability=sticky_actions,
            full_action_space=full_action_space,
            frameskip=frame_skip,
            autoreset_mode="SameStep",
            stack_num=1,
            noop_max=noop_max,
            life_loss_info=True,
            reward_clipping=False,
            use_fire_reset=True,
        )
        self.num_envs = num_envs
        self.env_id = env_id or rom
        self.observation_space = ArraySpec((1, 84, 84), "uint8")
        self.action_space = Discrete(len(self._env.ale.get_action_set()))

    def reset(self, seed: int) -> ArrayNest:
        seeds = np.array(environment_seeds(seed, self.num_envs), np.int32)
        frames: np.ndarray
        frames, info = self._env.reset(seed=seeds)
        self._game_start = _game_start(info)
        return frames

    def step(self, action: ArrayNest) -> VecStep:
        # ALE blocks forever on an action that it does not know.
        actions = check_actions(action, self.action_space, self.num_envs)
        observation, reward, terminated, truncated, info = self._env.step(actions)
        started, self._game_start = self._game_start, _game_start(info)
        return VecStep(
            observation,
            reward.astype(np.float32),
            terminated,
            truncated,
            self._game_start != started,
            info["final_obs"][truncated] if truncated.any() else None,
        )

    def close(self) -> None:
        del self._env  # its destructor ends the threads


def _game_start(info: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the emulated frame at which each current game began, int32 [E].

    A restart changes it and a lost life does not, which tells the two apart even in games without
    lives.
    """
    return info["frame_number"] - info["episode_frame_number"]


def make(spec: EnvSpec, num_envs: int, num_threads: int) -> AtariEnv:
    """Makes num_envs games of an id like PongNoFrameskip-v4 or ALE/Pong-v5."""
    env_id, options = spec.name, spec.options
    if spec.kwargs:
        raise EnvError(
            f"{env_id} takes no keyword arguments, got {', '.join(spec.kwargs)}: Atari games are "
            "configured by sticky_actions, frame_skip and full_action_space"
        )
    need("ale_py", env_id, "ale-py")
    sticky, skip = options.sticky_actions, options.frame_skip
    if sticky is None:
        # As Gymnasium registers it (Machado et al. 2018, arXiv 1709.06009): ALE/Pong-v5, and -v0.
        sticky = 0.0 if env_id.endswith("-v4") else 0.25
    return AtariEnv(
        rom_name(env_id),
        num_envs,
        env_id=env_id,
        num_threads=num_threads,
        sticky_actions=sticky,
        frame_skip=_FRAME_SKIP if skip is None else skip,
        full_action_space=options.full_action_space,
    )


def rom_name(env_id: str) -> str:
    """Returns ALE's name of the game: pong for PongNoFrameskip-v4, Pong-v4 and ALE/Pong-v5.

    Raises EnvError when the id is malformed or ALE has no such game.
    """
    match = ATARI_ID.fullmatch(env_id)
    if not match:
        raise EnvError(
            f"{env_id}: expected an Atari name such as ALE/Pong-v5 or PongNoFrameskip-v4"
        )
    game, roms = match[1] or match[2], roms_of_ale()
    if game not in roms:
        hint = did_you_mean(game, roms)
        raise EnvError(f"{env_id}: ALE has no game called {game}{hint}")
    return roms[game]
