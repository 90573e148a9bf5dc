# SPDX-License-Identifier: Apache-2.0
"""A network of every family, and environments of random observations for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    ObservationSpace,
)
from torchbeast.run import checkpoint as checkpoints


class Case(NamedTuple):
    """A network and its spaces."""

    network: str
    seen: ObservationSpace
    actions: ActionSpace = Discrete(5)
    frame_stack: int = 1
    use_lstm: bool = False
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only


VECTOR = ArraySpec((4,), "float32")
SCALED = ArraySpec((4,), "float64", -1000, 1000)  # normalised by running statistics
IMAGE = ArraySpec((1, 36, 36), "uint8")
MASK = ArraySpec((5,), "int8", 0, 1)
NAMES = ArraySpec((3,), "int64", 0, 6, (7,))
MASKED = {"action_mask": MASK, "names": NAMES, "numbers": SCALED}
ARM = Box((-1.0, 0.0), (1.0, 3.0), (2,))
CASES = {
    "mlp": Case("mlp", SCALED),
    "shallow": Case("shallow-norm", IMAGE, frame_stack=4),
    "deep": Case("deep", ArraySpec((2, 12, 12), "uint8")),
    "small": Case("small", ArraySpec((5, 6), "uint8", 0, 30)),
    "lstm": Case("mlp", SCALED, use_lstm=True),
    "gru": Case("small", ArraySpec((4, 4, 2), "bool"), use_lstm=True, kwargs={"core": "gru"}),
    "gtrxl": Case("mlp", SCALED, use_lstm=True, kwargs={"core": "gtrxl", "core_length": 3}),
    "masked": Case("mlp", MASKED, use_lstm=True),
    "masked-pair": Case("mlp", MASKED, MultiDiscrete((2, 3))),
    "masked-integers": Case("mlp", MASKED, Box((2, -1), (3, 1), (2, 1), "int16"), use_lstm=True),
    "stacked-box": Case("mlp", {"a": VECTOR, "b": (VECTOR, SCALED)}, ARM, frame_stack=3),
    "box": Case("mlp", VECTOR, ARM, use_lstm=True),
    "start": Case("mlp", VECTOR, Discrete(3, start=2)),
    "nest": Case("mlp", VECTOR, {"a": (MultiBinary((2,)), ARM), "b": Discrete(2)}),
    "dqn": Case("q-mlp", MASKED),
    "dqn-stacked": Case("q-shallow", IMAGE, frame_stack=4),
    "sac": Case("sac-mlp", SCALED, ARM),
    "td3": Case("td3-mlp", SCALED, ARM),
}


def agent_of(case: Case) -> Agent:
    """Returns an agent with random weights, which has seen some observations. Some of its greedy
    actions are out of the bounds of a Box.
    """
    torch.manual_seed(1)
    spec = ActorSpec(case.network, case.kwargs, use_lstm=case.use_lstm)
    agent = make_agent(spec, case.seen, case.actions, case.frame_stack)
    for name, weight in agent.model.named_parameters():
        if name == "policy.weight":
            weight.data.mul_(20)
    drawn = Drawn(case, 8)
    batch = map_leaves(lambda leaf: torch.from_numpy(leaf)[None], drawn.reset(7))
    if case.frame_stack == 1:
        agent.model.observe(batch)
    return agent._replace(model=agent.model.eval())


def save(path: Path, agent: Agent, **flags: Any) -> dict[str, Any]:
    """Writes the checkpoint of a run that trained the agent; returns its contents."""
    kwargs = {"model_kwargs": dict(agent.spec.kwargs), "use_lstm": agent.spec.use_lstm}
    saved = {
        "model_state_dict": agent.model.state_dict(),
        **checkpoints.labels(agent, {**kwargs, **flags}),
    }
    checkpoints.save(path, saved)
    return saved


class Drawn:
    """E environments of random observations and rewards, whose episodes end at random.

    sent: observation, reward and done before each step. executed: the actions of each.
    """

    env_id = "drawn"

    def __init__(self, case: Case, num_envs: int) -> None:
        self.num_envs, self.frame_stack = num_envs, case.frame_stack
        self.observation_space, self.action_space = case.seen, case.actions
        self.sent: list[tuple[Any, np.ndarray, np.ndarray]] = []
        self.executed: list[Any] = []

    def reset(self, seed: int) -> Any:
        self._random = np.random.default_rng(seed)
        zeros = np.zeros(self.num_envs, np.float32)
        self.sent.append((self._observation(), zeros, zeros == 0))
        return self.sent[0][0]

    def step(self, action: Any) -> VecStep:
        self.executed.append(action)
        reward = self._random.normal(size=self.num_envs).astype(np.float32)
        done = self._random.random(self.num_envs) < 0.2
        self.sent.append((self._observation(), reward, done))
        return VecStep.of_games(self.sent[-1][0], reward, done)

    def close(self) -> None:
        pass

    def _observation(self) -> Any:
        def drawn(spec: ArraySpec) -> np.ndarray:
            shape = (self.num_envs, *spec.shape)
            if spec.dtype.startswith("float"):
                scale = 1.0 if spec.high is None else spec.high / 2
                return (scale * self._random.normal(size=shape)).astype(spec.dtype)
            high = 255 if spec.high is None else spec.high
            array = self._random.integers(0, high, shape, endpoint=True).astype(spec.dtype)
            if spec is MASK:
                array[..., [1, 4]] = 1  # a choice of each of two
            return array

        return map_leaves(drawn, self.observation_space)


def of(name: str) -> str:
    """Returns the name of a factory of the environments of a case."""
    return f"{__name__}:{name.replace('-', '_')}"


def broken() -> None:
    """A factory whose environment cannot be made here."""
    raise OSError("no display")


def __getattr__(name: str) -> Any:
    case = CASES.get(name.replace("_", "-"))
    if case is None:
        raise AttributeError(name)

    def make(num_envs: int) -> Drawn:
        return Drawn(case, num_envs)

    return make
