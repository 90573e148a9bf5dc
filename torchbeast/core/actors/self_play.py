# SPDX-License-Identifier: Apache-2.0
"""Self-play: in every game one agent learns, and an earlier version of it plays the others.

    column   0  1  2  3         four games of two agents
    learns   a  b  b  a         drawn for each game
    against  7  7  3  3         the version that plays the other side until the game ends

The learner writes versions of the agent into a folder, the pool. Every process with environments
plays against one version at a time, and draws another one after as many games as it has columns,
at least eight:
the newest version in 35 % of the draws, the player that moves at random in 30 %, else any version.
Games against the random player keep the agent strong against odd moves, and the ratings comparable.

Ratings follow Elo (The Rating of Chessplayers, 1978): 400 points more mean odds of 10 to 1. The
random player has 0, and a version keeps the rating that the agent had when it was written.

docs/how-to/several-agents.md says how to use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbeast.core.actors.contract import ActorCritic, Agent, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.env_loop import initial_acted, inputs_of
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.computing import one_thread
from torchbeast.core.base.nest import Nest, flatten, map_leaves
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.agents import AgentsEnv
from torchbeast.core.envs.contract import FinalInfo, OwnVecEnv, VecStep
from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.errors import UsageError

_SUFFIX = ".version"
_NEWEST, _RANDOM = 0.35, 0.3  # shares of the draws
_FEWEST_GAMES = 8  # against a version; loading one takes about 2 ms
_K = 16.0  # how far the rating moves after a game, at most


class RandomPlayer(ActorCritic):
    """Takes every action that is allowed with the same probability."""

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, use_lstm: bool
    ) -> None:
        super().__init__()
        self._num_params = distribution_for(action_space).num_params

    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> ModelOutput:
        """Returns equal logits, and values of 0."""
        shape = inputs.reward.shape
        return ModelOutput(torch.zeros(*shape, self._num_params), torch.zeros(shape), core_state)


_RANDOM_VERSION: dict[str, Any] = {
    "model": {"name": f"{__name__}:{RandomPlayer.__qualname__}"},
    "weights": {},
    "elo": 0.0,
}


def version_path(pool: Path, step: int) -> Path:
    """Returns the file of the version that the agent was at an environment step."""
    return pool / f"{step:012}{_SUFFIX}"


def _versions(pool: Path) -> list[Path]:
    """Returns the files of a folder's versions, the newest last."""
    return sorted(pool.glob(f"*{_SUFFIX}"))


def newest_rating(pool: Path) -> float:
    """Returns the rating of the newest version in a folder; 0 without one."""
    versions = _versions(pool)
    return float(torch.load(versions[-1], weights_only=True)["elo"]) if versions else 0.0


def as_version(agent: Agent, elo: float) -> dict[str, Any]:
    """Returns the contents of a version's file."""
    weights = {name: value.cpu() for name, value in agent.model.state_dict().items()}
    return {"model": agent.spec.as_json(), "weights": weights, "elo": elo}


class Opponent:
    """A version of the agent, in all columns of the games of a process.

    Attributes:
        elo: Its rating.
    """

    def __init__(self, path: Path | None, env: AgentsEnv) -> None:
        """Reads a version; path: of its file, None for the random player.

        Raises UsageError if it is a version of another agent.
        """
        saved = _RANDOM_VERSION if path is None else torch.load(path, weights_only=True)
        spec = ActorSpec.from_json(saved["model"])
        spaces = env.observation_space, env.action_space, env.frame_stack
        self._model = make_agent(spec, *spaces).model
        self.elo: float = saved["elo"]
        try:
            self._model.load_state_dict(saved["weights"])
        except RuntimeError as error:
            raise UsageError(
                f"{path} is a version of an agent for a game other than {env.env_id}: use a new "
                "selfplay folder for each run"
            ) from error
        self._state = initial_acted(self._model, env.num_envs).state

    def act(self, inputs: ModelInputs) -> ArrayNest:
        """Returns an action for every column, leaves [E, ...]; inputs: leaves [1, E, ...]."""
        with one_thread():
            acted = self._model.act(inputs, self._state, "sample")
        self._state = acted.state
        return map_leaves(lambda leaf: leaf[0].numpy(), acted.action)


class SelfPlay(OwnVecEnv):
    """Games of several agents as a VecEnv: a column is a game, seen by the agent that learns.

    Attributes:
        elo: The rating of the agent that learns, as the games of this process show it.
    """

    final_info: FinalInfo

    def __init__(self, games: VecEnv, num_envs: int, pool: str) -> None:
        """games: of the kind that is played, in which no step was taken yet. Raises UsageError."""
        if not isinstance(games, AgentsEnv) or games.num_agents < 2:
            raise UsageError(
                f"selfplay needs a game of several agents, and {games.env_id} is not one: remove "
                "selfplay"
            )
        self._pool, self.num_envs, self.env_id = Path(pool), num_envs, games.env_id
        self._env = env = games.resized(num_envs * games.num_agents)
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._seats = np.zeros(num_envs, np.int64)  # columns of the agents that learn
        self._returns = np.zeros(env.num_envs)  # of each agent in its game
        self._drawn = Opponent(None, env)
        self.final_info = {}

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Gives the games options; see AgentsEnv.set_options."""
        self._env.set_options(options)

    def reset(self, seed: int) -> ArrayNest:
        env = self._env
        self._rng = np.random.default_rng(seed)
        torch.default_generator.manual_seed(seed)  # opponents draw their actions from it
        self.elo = newest_rating(self._pool)
        self._opponents: list[Opponent] = [self._drawn] * self.num_envs  # of each game
        self._games_left = 0  # to begin against the opponent that was drawn last
        self.final_info = {}
        seen = env.reset(seed)
        self._begin(range(self.num_envs))
        # The last row and actions of all columns.
        nothing, begins = np.zeros(env.num_envs, np.float32), np.ones(env.num_envs, bool)
        self._row: tuple[ArrayNest, np.ndarray, np.ndarray] = seen, nothing, begins
        zeros = distribution_for(self.action_space).zero_action((1, env.num_envs))
        self._actions: ArrayNest = map_leaves(lambda leaf: leaf[0].numpy(), zeros)
        return self._of_seats(seen)

    def step(self, action: ArrayNest) -> VecStep:
        self._actions = self._with_opponents(action)
        step, seats = self._env.step(self._actions), self._seats.copy()
        self._row = step.observation, step.reward, step.terminated | step.truncated
        self._returns += step.reward
        ended = np.flatnonzero(step.episode_end[seats])
        infos, over = self._env.final_info, np.flatnonzero(self._env.began).tolist()
        for game in over:  # an agent that learns may end earlier
            self._rate(game)
        self.final_info = {
            game: {**infos.get(seats[game], {}), "elo": self.elo} for game in ended.tolist()
        }
        self._begin(over)
        final = step.final_observation
        if final is not None:
            kept = np.isin(np.flatnonzero(step.truncated), seats)
            final = map_leaves(lambda leaf: leaf[kept], final) if kept.any() else None
        names = ("reward", "terminated", "truncated", "episode_end", "resets")
        return VecStep(
            self._of_seats(step.observation),
            **{name: getattr(step, name)[seats] for name in names},
            final_observation=final,
        )

    def render(self) -> np.ndarray | None:
        """Returns a picture of the first game; see AgentsEnv.render."""
        return self._env.render()

    def close(self) -> None:
        """Closes every game."""
        self._env.close()

    def _of_seats(self, observation: ArrayNest) -> ArrayNest:
        return map_leaves(lambda leaf: leaf[self._seats], observation)

    def _begin(self, games: Iterable[int]) -> None:
        """Draws who learns in these games, and sets the opponents for them."""
        for game in games:
            if not self._games_left:
                self._drawn = self._draw()
                self._games_left = max(self.num_envs, _FEWEST_GAMES)
            self._games_left -= 1
            self._opponents[game] = self._drawn
            first = game * self._env.num_agents
            self._seats[game] = first + self._rng.integers(self._env.num_agents)
            self._returns[first : first + self._env.num_agents] = 0

    def _with_opponents(self, action: ArrayNest) -> ArrayNest:
        """Returns the actions of all columns: `action` where an agent learns, else opponents'."""
        last = map_leaves(lambda leaf: torch.from_numpy(leaf)[None], self._actions)
        inputs = inputs_of(*self._row, last)
        chosen = map_leaves(np.copy, self._actions)
        leaves = flatten(chosen)
        for opponent in dict.fromkeys(self._opponents):
            plays = [other is opponent for other in self._opponents]
            columns = np.repeat(plays, self._env.num_agents)
            for leaf, theirs in zip(leaves, flatten(opponent.act(inputs)), strict=True):
                leaf[columns] = theirs[columns]
        for leaf, ours in zip(leaves, flatten(action), strict=True):
            leaf[self._seats] = ours
        return chosen

    def _rate(self, game: int) -> None:
        """Moves the rating by the result of a game: up for more than was expected, or down."""
        first = game * self._env.num_agents
        returns = self._returns[first : first + self._env.num_agents]
        ours = self._returns[self._seats[game]]
        margin = ours - (returns.sum() - ours) / (len(returns) - 1)
        score = 0.5 * (1 + np.sign(margin))
        expected = 1 / (1 + 10 ** ((self._opponents[game].elo - self.elo) / 400))
        self.elo += _K * float(score - expected)

    def _draw(self) -> Opponent:
        versions, drawn = _versions(self._pool), self._rng.random()
        if not versions or drawn < _RANDOM:
            return Opponent(None, self._env)
        is_newest = drawn < _RANDOM + _NEWEST
        number = len(versions) - 1 if is_newest else self._rng.integers(len(versions))
        return Opponent(versions[number], self._env)
