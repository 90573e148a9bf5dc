# SPDX-License-Identifier: Apache-2.0
"""MinAtar: five Atari games on boards of 10x10 (Young and Tian 2019, arXiv:1903.03176).

The ids are the ones of MinAtar's Gymnasium interface, MinAtar/Breakout-v1: v1 offers only actions
that have an effect in the game, v0 all six. The games are stepped without that interface, which
doubles their time.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.base.specs import check_takes
from torchbeast.core.envs.contract import OwnVecEnv, VecStep
from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, Discrete
from torchbeast.core.envs.sync_vec_env import check_actions, environment_seeds
from torchbeast.envs.spec import EnvError, EnvSpec, need

PREFIX = "MinAtar/"
CHANNELS = 10
"""Of the game that has most."""
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")

_ID = re.compile(rf"{PREFIX}(\w+)-v([01])")


class MinAtarEnv(OwnVecEnv):
    """E games of one kind, without a time limit beyond the games' own.

    Observation: bool [10, 10, channels], one channel for each kind of object; the keyword argument
    channels adds empty ones, up to that number. The previous action
    is repeated with probability 0.1 (sticky_action_prob).
    """

    def __init__(
        self,
        game: str,
        num_envs: int,
        *,
        minimal_actions: bool,
        env_id: str,
        channels: int = 0,
        **kwargs: Any,
    ) -> None:
        """Makes the games.

        game: MinAtar's name of it. minimal_actions: offer only actions that have an effect in it.
        kwargs: further arguments of MinAtar's constructor.
        """
        make_game = _environment_class()
        check_takes(make_game, kwargs, env_id, positional=1)
        self._games = [make_game(game, **kwargs) for _ in range(num_envs)]
        first = self._games[0]
        self._padding = max(0, channels - first.state_shape()[-1])
        self._actions = first.minimal_action_set() if minimal_actions else range(6)
        self.num_envs = num_envs
        self.env_id = env_id
        self.observation_space = ArraySpec(self._padded(first.state()).shape, "bool")
        self.action_space = Discrete(len(self._actions))

    def reset(self, seed: int) -> ArrayNest:
        for game, game_seed in zip(
            self._games, environment_seeds(seed, self.num_envs), strict=True
        ):
            game.seed(game_seed)
            game.last_action = 0  # it may be repeated, and reset() does not clear it
            game.reset()
        return self._observation()

    def step(self, action: ArrayNest) -> VecStep:
        actions = check_actions(action, self.action_space, self.num_envs)
        outcomes = [
            game.act(self._actions[chosen])
            for game, chosen in zip(self._games, actions.tolist(), strict=True)
        ]
        reward, ended = (np.array(column) for column in zip(*outcomes, strict=True))
        for index in np.flatnonzero(ended):
            self._games[index].reset()
        return VecStep.of_games(self._observation(), reward.astype(np.float32), ended)

    def _observation(self) -> np.ndarray:
        return np.stack([self._padded(game.state()) for game in self._games])

    def _padded(self, board: np.ndarray) -> np.ndarray:
        return np.pad(board, ((0, 0), (0, 0), (0, self._padding))) if self._padding else board


def make(spec: EnvSpec, num_envs: int) -> MinAtarEnv:
    """Makes num_envs games of an id like MinAtar/Breakout-v1; raises EnvError for a wrong id."""
    env_id = spec.name
    match = _ID.fullmatch(env_id)
    if match is None:
        raise EnvError(f"{env_id}: expected a MinAtar name such as MinAtar/Breakout-v1")
    name, version = match.groups()
    by_name = {game.title().replace("_", ""): game for game in GAMES}
    if name not in by_name:
        raise EnvError(f"{env_id}: MinAtar has no game called {name}{did_you_mean(name, by_name)}")
    need("minatar", env_id, "'torchbeast[minatar]'")
    return MinAtarEnv(
        by_name[name], num_envs, minimal_actions=version == "1", env_id=env_id, **spec.kwargs
    )


def _environment_class() -> Any:
    """Imports MinAtar's Environment without its warning about missing packages for rendering."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        from minatar import Environment
    finally:
        logging.disable(before)
    return Environment
