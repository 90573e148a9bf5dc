# SPDX-License-Identifier: Apache-2.0
"""TorchBeast: reinforcement learning from many environments at once, in PyTorch.

`__all__` lists the public names, here and in `torchbeast.core.actors`, `.algos`, `.envs` and
`.storages`, `torchbeast.envs`, `torchbeast.learner`, `torchbeast.reporting` and
`torchbeast.schemes`, and the functions of `torchbeast.core.losses`, `.returns`, `.vtrace`,
`.algos.unroll`, `.base.checks` and `.base.nest`. They stay where they are; everything else may
move. Each name in `__all__` is imported when it is first used, so importing the package is cheap:
an environment-server process never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing
from torchbeast.errors import end_imports_in_one_line

__version__ = "0.1.0"  # pyproject.toml reads the version of the package here

end_imports_in_one_line()

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
    from torchbeast.core.algos.config import IMPALAConfig as IMPALAConfig
    from torchbeast.core.algos.config import PPOConfig as PPOConfig
    from torchbeast.core.algos.impala import IMPALA as IMPALA
    from torchbeast.core.algos.ppo import PPO as PPO
    from torchbeast.core.base.specs import ActorSpec as ActorSpec
    from torchbeast.core.envs.contract import VecStep as VecStep
    from torchbeast.core.envs.spaces import ArraySpec as ArraySpec
    from torchbeast.core.envs.spaces import Discrete as Discrete
    from torchbeast.core.envs.sync_vec_env import SyncVecEnv as SyncVecEnv
    from torchbeast.core.envs.vec_env import VecEnv as VecEnv
    from torchbeast.core.storages.rollout import Rollout as Rollout
    from torchbeast.envs import make as make_env
    from torchbeast.envs import make_vec as make_vec
    from torchbeast.envs.spec import EnvOptions as EnvOptions
    from torchbeast.envs.spec import EnvSpec as EnvSpec
    from torchbeast.errors import IncompatibleParts as IncompatibleParts
    from torchbeast.errors import RunError as RunError
    from torchbeast.errors import UsageError as UsageError
    from torchbeast.evaluation.agent import load_agent as load_agent
    from torchbeast.evaluation.exporting import export as export
    from torchbeast.learner.learner import Learner as Learner
    from torchbeast.run.checkpoint import load as load_checkpoint
    from torchbeast.schemes.scheme import Scheme as Scheme

_lazy, __getattr__, __dir__ = importing(__name__)
__all__ = ["__version__", "load_checkpoint", "make_env"]
__all__ += sorted({*_lazy} - {*__all__})
