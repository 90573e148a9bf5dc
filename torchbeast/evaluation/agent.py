# SPDX-License-Identifier: Apache-2.0
"""An agent after training: loads a checkpoint and chooses actions, without the environment.

agent = torchbeast.load_agent("logs/my_run")
observation, _ = env.reset()
action = agent.act(observation)
"""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchbeast.core.actors.contract import Acted, Agent, Mode
from torchbeast.core.actors.env_loop import initial_acted, inputs_of
from torchbeast.core.actors.off_policy import OffPolicyActor
from torchbeast.core.actors.registry import is_actor_class
from torchbeast.core.base.checks import require
from torchbeast.core.base.computing import one_thread, own_settings
from torchbeast.core.base.nest import flatten, map_leaves, pack_as
from torchbeast.core.base.specs import Precision
from torchbeast.core.envs.frame_stack import FrameStacker
from torchbeast.core.envs.selection import leaf_keys, select
from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, matching_leaves, places
from torchbeast.core.envs.sync_vec_env import in_bounds
from torchbeast.envs.env_process import EnvProcess, Spaces
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.evaluation.play import agent_spaces, env_of, newest_of, restored
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.checkpoint import FoundCheckpoint

Memory = tuple[FrameStacker, Acted | None]
"""The frames of the last steps, and what the network returned at the last one, if any."""

_ENV_IS_NEEDED = (
    "The environment of the run must work on this machine. Fix it, or select another one with the "
    "same observations and actions: --env my_module:make_env, or in Python env='my_module:make_env'"
)


def load_agent(
    run: str | Path, env: EnvSpec | str = "", precision: Precision = "float32"
) -> TrainedAgent:
    """Loads the agent of a run, to choose actions with it in your own program.

    The environment is not made, except for a checkpoint of TorchBeast 2019, which does not record
    its spaces, and for a network that a function makes instead of a class: a child process
    then makes the environment and reads its spaces.

    Args:
        run: The run's folder, for its newest checkpoint; the path of a checkpoint; or zoo:NAME, for
            the agent that was trained with a preset.
        env: The environment of the run, where a child process has to make it. You only need to
            name it if it is your own factory and has keyword arguments.
        precision: Precision of the network's features, as in `--precision`.

    Returns:
        The agent, ready for its first `act`.

    Raises:
        UsageError: The checkpoint is missing, or does not fit its network or environment.
        RunError: The file, the network's code or the environment fails.

    Example:
        ```python
        agent = torchbeast.load_agent("zoo:cartpole-ppo")
        action = agent.act(observation)
        ```
    """
    found = newest_of(Path(run))
    # If the file names a function as its network, the function must not get what the file says.
    is_class = is_actor_class(checkpoints.actor_spec(found.checkpoint))
    spaces = checkpoints.spaces(found.checkpoint) if is_class else None
    if spaces is None:
        with closing(env_process(found, env, 1)) as envs:
            spaces = agent_spaces(envs)
    return agent_for(spaces, found, precision)


def env_process(found: FoundCheckpoint, env: EnvSpec | str, num_envs: int) -> EnvProcess:
    """Makes environments of the run in a child process; env: see `load_agent`.

    Raises UsageError or RunError, with advice unless `env` names the environment.
    """
    asked = EnvSpec(env) if isinstance(env, str) else env
    try:
        return EnvProcess(env_of(found.checkpoint, asked), num_envs)
    except (UsageError, RunError) as error:
        if asked.name:
            raise
        kind = UsageError if isinstance(error, UsageError) else RunError
        raise kind(f"{error}\n{_ENV_IS_NEEDED}") from error


def agent_for(spaces: Spaces, found: FoundCheckpoint, precision: Precision) -> TrainedAgent:
    """Makes the agent of a checkpoint for an environment with these spaces."""
    agent = restored(found.checkpoint, spaces, found.path)
    agent.model.set_precision(precision, torch.device("cpu"))
    return TrainedAgent(agent)


class TrainedAgent:
    """Chooses the actions that the agent of a run would choose, for one environment or several.

    Between the steps it keeps the recurrent state, the last action and the stack of frames of each
    environment. One thread uses it.

    Example:
        ```python
        agent.reset()
        reward, done = 0.0, False
        while not done:
            action = agent.act(observation, reward)
            observation, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        ```
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._space, self._keys = agent.single_frame_space, leaf_keys(agent.single_frame_space)
        self.reset()

    def __repr__(self) -> str:
        model = self.agent.spec.name
        return f"TrainedAgent({model}, {self._space} -> {self.agent.action_space})"

    def reset(self) -> None:
        """Clears what it remembers: the next `act` starts a new episode in every environment."""
        self._stacker = FrameStacker(self.agent.frame_stack)
        self.acted: Acted | None = None

    def act(
        self,
        observation: Any,
        reward: float | np.ndarray | None = None,
        done: bool | np.ndarray = False,
        *,
        sampled: bool = False,
    ) -> Any:
        """Chooses the next action, for one environment or for E environments together.

        Args:
            observation: One observation of the environment, or a batch of them, whose arrays have
                E as their first dimension. Entries of a dict that the network does not know are
                ignored.
            reward: The reward of the last step, a number or [E]. Actor-critics read it, so they
                need it at every step except the first one after `reset`.
            done: Whether the observation is the first of a new episode, a bool or [E]. The agent
                then clears what it remembers of that environment. It need not be given after
                `reset`.
            sampled: Sample the action from the policy with torch's global generator, as in
                training. By default the most likely action is taken.

        Returns:
            The action as the environment's action space has it, clipped to the bounds of a Box;
            for a batch, arrays [E, ...].

        Raises:
            ValueError: The observation does not fit the space that the agent was trained with, the
                number of environments changes without a `reset`, or the reward is missing.
            RunError: An action mask allows no action.

        A call that raises an error leaves the agent as it was before.
        """
        memory = self._stacker, self.acted
        action, (self._stacker, self.acted) = self._next(memory, observation, reward, done, sampled)
        return action

    def _next(
        self, memory: Memory, observation: Any, reward: Any, done: Any, sampled: bool
    ) -> tuple[Any, Memory]:
        """Returns the next action, see `act`, and the memory after it."""
        stacker, acted = copy.copy(memory[0]), memory[1]
        rows, num_envs, is_batch = self._rows(observation)
        begins = np.full(num_envs, acted is None) | np.asarray(done, bool)
        rewards = np.full(num_envs, 0.0 if reward is None else reward, np.float32)
        if acted is None:
            stacks = stacker.reset(rows)
            with own_settings():
                acted = initial_acted(self.agent.model, num_envs)
        else:
            self._check(acted, num_envs, reward)
            stacks = stacker.push(rows, begins)
        inputs = inputs_of(stacks, rewards, begins, acted.action)
        mode: Mode = "sample" if sampled else "greedy"
        with one_thread():  # batches are small, so more threads would mostly wait
            acted = self.agent.model.act(inputs, acted.state, mode)
        arrays = map_leaves(lambda leaf: leaf[0].numpy().copy(), acted.action)
        action = in_bounds(self.agent.action_space, arrays, num_envs)
        action = action if is_batch else map_leaves(lambda leaf: leaf[0], action)
        return action, (stacker, acted)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: bool | np.ndarray | None = None,
        deterministic: bool = True,
    ) -> tuple[Any, Any]:
        """Chooses the next action like Stable-Baselines3's `predict`, without changing the agent.

        The state stands for what `act` remembers. Networks that read the last reward see 0 instead,
        so they play slightly better with `act`.

        Args:
            observation: One observation, or a batch of them, as in `act`.
            state: The second result of the call before: recurrent state, last action and stacked
                frames. None: the observation is the first of an episode.
            episode_start: Whether the observation is the first of an episode, a bool or [E].
            deterministic: Take the most likely action; otherwise sample it, as in training.

        Returns:
            The action, as from `act`, and the state for the next call.

        Raises:
            ValueError: As `act`.
            RunError: As `act`.

        Example:
            ```python
            action, state = agent.predict(observation, state)
            ```
        """
        memory = (FrameStacker(self.agent.frame_stack), None) if state is None else state
        begins = False if episode_start is None else episode_start
        return self._next(memory, observation, 0.0, begins, not deterministic)

    def _rows(self, observation: Any) -> tuple[ArrayNest, int, bool]:
        """Returns leaves [E, ...] in the dtypes of the space, E, and whether it is a batch."""
        seen, space = select(observation, self._keys), self._space
        spec, leaf, _ = next(places(space, seen, "observation"))
        is_batch = np.ndim(leaf) > len(spec.shape)
        num_envs = len(leaf) if is_batch else 1
        if is_batch:
            space = map_leaves(lambda spec: ArraySpec((num_envs, *spec.shape), spec.dtype), space)
        leaves = list(matching_leaves(space, seen, "observation"))
        rows = leaves if is_batch else [leaf[None] for leaf in leaves]
        return pack_as(space, rows), num_envs, is_batch

    def _check(self, acted: Acted, num_envs: int, reward: Any) -> None:
        """Raises ValueError where the agent acted for others before, or lacks the reward."""
        before = flatten(acted.action)[0].shape[1]
        require(
            num_envs == before,
            f"the agent acts for {before} environments, got observations of {num_envs}: call "
            "reset() first",
        )
        require(
            reward is not None or isinstance(self.agent.model, OffPolicyActor),
            "the network reads the reward of the last step, got none: call act(observation, "
            "reward), or reset() at the start of an episode",
        )
