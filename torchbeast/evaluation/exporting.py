# SPDX-License-Identifier: Apache-2.0
"""Exports the agent of a run as a file that runs without TorchBeast, by torch.export or ONNX.

The file is a function of one step of B environments. Every array has B as its first dimension, and
the memory of the agent is both an input and an output:

    inputs     observation, reward, done, state.core.0, state.frames, state.last_action
    outputs    action, policy_logits, baseline, next_state.core.0, next_state.frames, ...

A nest has an entry for each leaf, observation.glyphs. In the first step of an episode done is true;
before the very first step the state is zeros.
"""

from __future__ import annotations

import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torchbeast.core.actors.contract import Agent, ModelInputs, zeros_of
from torchbeast.core.base.computing import own_settings
from torchbeast.core.base.nest import map_leaves, map_leaves2, pack_as
from torchbeast.core.base.specs import Precision
from torchbeast.core.envs.spaces import Box
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError, expanded, refusing_paths
from torchbeast.evaluation.agent import TrainedAgent, agent_for, env_process
from torchbeast.evaluation.play import agent_spaces, newest_of
from torchbeast.reporting.run_folder import write_atomically
from torchbeast.run.episodes import of_whole_games

NUM_ENVS, NUM_STEPS = 4, 32  # of the comparison with the agent; of a larger game, all its agents
_BEGINS = 8  # steps after which an episode begins for both, whatever the environment says
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5  # largest differences

NamedArrays = dict[str, np.ndarray]
RunPolicy = Callable[[NamedArrays], NamedArrays]


def export(
    run: str | Path, path: str | Path, env: EnvSpec | str = "", precision: Precision = "float32"
) -> Path:
    """Writes the agent of a run to a file that runs without TorchBeast, with torch or ONNX.

    The file takes observations as the environment gives them: normalisation, conversion of dtypes,
    frame stacks, action masks and the bounds of actions are inside. It is only written if it
    chooses the same actions as the agent on observations of the environment, which a child process
    makes.

    Args:
        run: The run's folder, for its newest checkpoint, or the path of a checkpoint.
        path: The file to write: `.pt2` for `torch.export`; `.onnx` for ONNX, which needs
            `pip install 'torchbeast[onnx]'`.
        env: The environment of the run. You only need to name it if it is your own factory and has
            keyword arguments.
        precision: Precision of the network's features, as in `--precision`; float32 for ONNX.

    Returns:
        The path of the file.

    Raises:
        UsageError: The checkpoint is missing or does not fit, or the file cannot be written.
        RunError: The network cannot be exported, the file does not choose the agent's actions, or
            the environment fails.

    Example:
        ```python
        torchbeast.export("~/logs/torchbeast/latest", "policy.onnx")
        ```
    """
    target = expanded(path)
    if target.suffix not in (".pt2", ".onnx"):
        raise UsageError(f"{path}: expected the name of a .pt2 or .onnx file")
    is_onnx = target.suffix == ".onnx"
    if is_onnx and precision != "float32":
        raise UsageError(
            f"{path}: convolutions in ONNX do not support precision {precision}: remove precision, "
            "or write a .pt2 file"
        )
    found = newest_of(Path(run))
    start = functools.partial(env_process, found, env)
    with closing(of_whole_games(start, NUM_ENVS)) as envs:
        agent = agent_for(agent_spaces(envs), found, precision)
        with own_settings():  # after the import of a user's network, which may change settings
            policy = ExportedPolicy(agent.agent)
            with quiet():
                data, runner = (_onnx if is_onnx else _torch)(policy, traced(policy))
            check_agreement(agent, policy, runner, envs)
    with refusing_paths("use another path"):
        write_atomically(target, data)
    return target


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings and log messages of torch that do not concern the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"The tensor attributes .*_flat_weights|.*LeafSpec")
            yield
    finally:
        logger.setLevel(level)


class ExportedPolicy(nn.Module):
    """One step of an agent as a function of named tensors [B, ...]; takes the greedy action."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.model = agent.model.requires_grad_(False)  # so that its outputs are plain arrays
        self._agent, self._is_stacked = agent, agent.frame_stack > 1
        self._zero = agent.model.distribution.zero_action((1,))
        self._like = self._zeros(1)

    def start(self, num_envs: int) -> dict[str, Tensor]:
        """Returns the inputs of the first step, with observations of zeros."""
        return named("", self._zeros(num_envs))

    def _zeros(self, num_envs: int) -> dict[str, Any]:
        stacked = self._agent.observation_space
        action = self.model.distribution.zero_action((num_envs,))
        return {
            "observation": zeros_of(self._agent.single_frame_space, num_envs),
            "reward": torch.zeros(num_envs),
            "done": torch.ones(num_envs, dtype=torch.bool),
            "state": {
                "core": map_leaves(_swapped, self.model.initial_state(num_envs)),
                "frames": zeros_of(stacked, num_envs) if self._is_stacked else (),
                "last_action": map_leaves(torch.zeros_like, action),
            },
        }

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the action, what the network says besides, and the next state."""
        step = pack_as(self._like, [inputs[name] for name in named("", self._like)])
        state, done = step["state"], step["done"]
        seen = self._stacked(step["observation"], state["frames"], done)
        # The state has the difference to the action before the first one, so that it begins as 0.
        last_action = map_leaves2(torch.add, state["last_action"], self._zero)
        rows = map_leaves(lambda leaf: leaf[None], (seen, step["reward"], done, last_action))
        acted = self.model.choose(ModelInputs(*rows), map_leaves(_swapped, state["core"]), "greedy")
        action = map_leaves(_of_the_step, acted.action)
        after = {
            "core": map_leaves(_swapped, acted.state),
            "frames": seen if self._is_stacked else (),
            "last_action": map_leaves2(torch.sub, action, self._zero),
        }
        return {
            **named("action", map_leaves2(_in_bounds, self._agent.action_space, action)),
            **map_leaves(_of_the_step, acted.extras),
            **named("next_state", after),
        }

    def _stacked(self, observation: Any, stacks: Any, done: Tensor) -> Any:
        """Returns stacks [B, k * C, ...] that end with these frames, as FrameStacker does."""
        num_frames = self._agent.frame_stack

        def pushed(stack: Tensor, frames: Tensor) -> Tensor:
            begins = done.view(-1, *[1] * (stack.dim() - 1))
            shifted = torch.cat([stack[:, frames.shape[1] :], frames], 1)
            return torch.where(begins, torch.cat([frames] * num_frames, 1), shifted)

        return map_leaves2(pushed, stacks, observation) if self._is_stacked else observation


def _of_the_step(leaf: Tensor) -> Tensor:
    return leaf.squeeze(0)


def _swapped(leaf: Tensor) -> Tensor:
    """Returns a recurrent state [layers, B, hidden] as [B, layers, hidden], or the reverse."""
    return leaf.transpose(0, 1).contiguous()


def _in_bounds(space: Any, action: Tensor) -> Tensor:
    if not isinstance(space, Box):
        return action
    bounds = (torch.tensor(bound, dtype=action.dtype) for bound in (space.low, space.high))
    clipped = action.clamp(*(bound.reshape(space.shape) for bound in bounds))
    return clipped.to(getattr(torch, space.dtype)) if space.is_integer else clipped


def named(name: str, nest: Any) -> dict[str, Any]:
    """Returns the leaves of a nest by their places, such as observation.glyphs or state.core.0."""
    if isinstance(nest, tuple):
        nest = {f"{index}": entry for index, entry in enumerate(nest)}
    elif not isinstance(nest, dict):
        return {name: nest}
    start = f"{name}." if name else ""
    parts = [named(f"{start}{key}", nest[key]) for key in sorted(nest)]
    return {place: leaf for part in parts for place, leaf in part.items()}


def traced(policy: ExportedPolicy) -> ExportedProgram:
    """Returns the program of the policy for any number of environments; raises RunError."""
    example = policy.start(2)  # sizes 0 and 1 are special
    batch = Dim("batch")
    shapes = {name: {0: batch} for name in example}
    try:
        with own_settings(), torch.no_grad():
            return torch.export.export(policy, (example,), dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # of many types: torch's, and the network code's
        raise RunError(f"torch.export cannot trace the network: {error}") from error


def _torch(policy: ExportedPolicy, program: ExportedProgram) -> tuple[bytes, RunPolicy]:
    """Returns the contents of a .pt2 file, and a function that runs it."""
    data = io.BytesIO()
    torch.export.save(program, data)
    data.seek(0)
    loaded = torch.export.load(data).module()

    def run(inputs: NamedArrays) -> NamedArrays:
        outputs = loaded({name: torch.tensor(array) for name, array in inputs.items()})
        return {name: output.numpy() for name, output in outputs.items()}

    return data.getvalue(), run


def _onnx(policy: ExportedPolicy, program: ExportedProgram) -> tuple[bytes, RunPolicy]:
    """Returns the contents of an .onnx file, and a function that runs it."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - which torch.onnx needs
    except ImportError as error:
        raise UsageError(
            f"ONNX needs {error.name}: pip install 'torchbeast[onnx]', or write a .pt2 file"
        ) from None
    start = policy.start(2)
    outputs = list(program.module()(start))
    exported = torch.onnx.export(
        program, (), input_names=list(start), output_names=outputs, dynamo=True, verbose=False
    )
    assert exported is not None
    data = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data)

    def run(inputs: NamedArrays) -> NamedArrays:
        return dict(zip(outputs, session.run(outputs, inputs), strict=True))

    return data, run


def check_agreement(
    agent: TrainedAgent, policy: ExportedPolicy, run: RunPolicy, env: VecEnv
) -> None:
    """Plays NUM_STEPS steps. Raises RunError unless an exported file says what the agent says."""
    agent.reset()
    inputs = {name: leaf.numpy() for name, leaf in policy.start(env.num_envs).items()}
    reward = np.zeros(env.num_envs, np.float32)
    seen, done = env.reset(0), reward > 0
    for number in range(NUM_STEPS):
        begins = done | (number % _BEGINS == 0)
        action = agent.act(seen, reward, begins)
        assert agent.acted is not None
        extras = {name: extra[0].numpy() for name, extra in agent.acted.extras.items()}
        outputs = run(inputs | named("", {"observation": seen, "reward": reward, "done": begins}))
        for name, wanted in {**named("action", action), **extras}.items():
            if not np.allclose(outputs[name], wanted, _RELATIVE, _ABSOLUTE):
                raise RunError(
                    f"the exported file differs from the agent: at step {number} its {name} is "
                    f"{outputs[name].tolist()}, expected {wanted.tolist()}. Nothing was written"
                )
        after = ((name, leaf) for name, leaf in outputs.items() if name.startswith("next_"))
        inputs |= {name.removeprefix("next_"): leaf for name, leaf in after}
        step = env.step(action)
        seen, reward, done = step.observation, step.reward, step.terminated | step.truncated
