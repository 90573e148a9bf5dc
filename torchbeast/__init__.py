# SPDX-License-Identifier: Apache-2.0
"""TorchBeast: reinforcement learning from many environments at once, in PyTorch.

The names in `__all__` are public and stay where they are, and so do those that
docs/explanation/schemes.md and docs/how-to/extending.md import from subpackages; everything else
may move. Each name in `__all__` is imported when it is first used, so importing the package is
cheap: an environment-server process never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

__version__ = "0.1.0"  # pyproject.toml reads the version of the package here

if TYPE_CHECKING:
    from torchbeast.core import vtrace as vtrace
    from torchbeast.core.actors.contract import Acted as Acted
    from torchbeast.core.actors.contract import Actor as Actor
    from torchbeast.core.actors.contract import ActorCritic as ActorCritic
    from torchbeast.core.actors.contract import ModelInputs as ModelInputs
    from torchbeast.core.actors.contract import ModelOutput as ModelOutput
    from torchbeast.core.actors.distributions import distribution_for as distribution_for
    from torchbeast.core.actors.registry import make_agent as make_agent
    from torchbeast.core.algos.base import Algorithm as Algorithm
    from torchbeast.core.algos.config import ImpalaConfig as ImpalaConfig
    from torchbeast.core.algos.config import PPOConfig as PPOConfig
    from torchbeast.core.algos.impala import Impala as Impala
    from torchbeast.core.algos.ppo import PPO as PPO
    from torchbeast.core.base.specs import ActorSpec as ActorSpec
    from torchbeast.core.envs.spaces import ArraySpec as ArraySpec
    from torchbeast.core.envs.spaces import Discrete as Discrete
    from torchbeast.core.envs.vec_env import SyncVecEnv as SyncVecEnv
    from torchbeast.core.envs.vec_env import VecEnv as VecEnv
    from torchbeast.core.envs.vec_env import VecStep as VecStep
    from torchbeast.core.storages.rollout import Rollout as Rollout
    from torchbeast.envs import make as make_env
    from torchbeast.envs.spec import EnvOptions as EnvOptions
    from torchbeast.envs.spec import EnvSpec as EnvSpec
    from torchbeast.errors import RunError as RunError
    from torchbeast.errors import UsageError as UsageError
    from torchbeast.learner.learner import Learner as Learner
    from torchbeast.run.checkpoint import load as load_checkpoint
    from torchbeast.schemes.scheme import Scheme as Scheme

_FOUND_IN = {
    "Acted": "core.actors.contract",
    "Actor": "core.actors.contract",
    "ActorCritic": "core.actors.contract",
    "ActorSpec": "core.base.specs",
    "Algorithm": "core.algos.base",
    "ArraySpec": "core.envs.spaces",
    "Discrete": "core.envs.spaces",
    "EnvOptions": "envs.spec",
    "EnvSpec": "envs.spec",
    "Impala": "core.algos.impala",
    "ImpalaConfig": "core.algos.config",
    "Learner": "learner.learner",
    "ModelInputs": "core.actors.contract",
    "ModelOutput": "core.actors.contract",
    "PPO": "core.algos.ppo",
    "PPOConfig": "core.algos.config",
    "Rollout": "core.storages.rollout",
    "RunError": "errors",
    "Scheme": "schemes.scheme",
    "SyncVecEnv": "core.envs.vec_env",
    "UsageError": "errors",
    "VecEnv": "core.envs.vec_env",
    "VecStep": "core.envs.vec_env",
    "distribution_for": "core.actors.distributions",
    "load_checkpoint": "run.checkpoint:load",
    "make_agent": "core.actors.registry",
    "make_env": "envs:make",
    "vtrace": "core.vtrace",
}

__all__ = ["__version__", "load_checkpoint", "make_env"]
__all__ += sorted(set(_FOUND_IN) - set(__all__))

__getattr__ = importing(__name__, _FOUND_IN)


def __dir__() -> list[str]:
    return sorted(__all__)
