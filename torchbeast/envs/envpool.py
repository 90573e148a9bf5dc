# SPDX-License-Identifier: Apache-2.0
"""EnvPool's tasks, stepped together in C++ (Weng et al. 2022, arXiv:2206.10558).

An id is `envpool:` and the name of a task, such as envpool:CartPole-v1. docs/how-to/envpool.md says
how the tasks are configured. `core/envs/env_pool.py` adapts a pool.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.base.specs import import_module, values_in
from torchbeast.core.envs.env_pool import EnvPoolEnv
from torchbeast.envs.spec import EnvError, EnvSpec
from torchbeast.errors import UsageError

PREFIX = "envpool:"

_OURS = ("num_envs", "batch_size", "seed", "env_seed", "env_type", "gym_reset_return_info")


def make(spec: EnvSpec, num_envs: int, num_threads: int) -> EnvPoolEnv:
    """Makes num_envs environments of an id like envpool:Pong-v5.

    spec: its kwargs are options of the task, num_threads included. Raises EnvError if EnvPool does
    not have the task, or does not take an option.
    """
    env_id, task = spec.name, spec.name.removeprefix(PREFIX)
    if of_atari := spec.options.of_atari():
        raise EnvError(
            f"{env_id} does not take {' and '.join(of_atari)}: configure it by EnvPool's own "
            "env_kwargs, such as repeat_action_probability and frame_skip"
        )
    if find_spec("envpool") is None:
        raise EnvError(
            f"{env_id} needs EnvPool, which is not installed: pip install 'torchbeast[envpool]'"
        )
    envpool: Any = import_module("envpool", env_id)
    tasks = envpool.list_all_envs()
    if task not in tasks and (short := task.rpartition("/")[2]) in tasks:
        task = short  # procgen/CoinrunEasy-v0
    if task not in tasks:
        hint = did_you_mean(task, tasks)
        raise EnvError(f"{env_id}: EnvPool does not know the task {task}{hint}")
    try:
        from_pixels = bool(spec.kwargs.get("from_pixels"))  # which has other options
        config = envpool.make_spec(task, from_pixels=from_pixels).config._asdict()
        _check_options(spec, config)
        kwargs = {"num_threads": num_threads, **spec.kwargs}
        # Frames are sent one by one, and the learner's process stacks them.
        frame_stack = kwargs.get("stack_num", config.get("stack_num", 1))
        single = {"stack_num": 1} if "stack_num" in config else {}
        pool = envpool.make(task, env_type="gymnasium", num_envs=num_envs, **{**kwargs, **single})
        return EnvPoolEnv(pool, env_id, frame_stack)
    except UsageError:
        raise
    except Exception as error:  # wrong types of options, and missing libraries
        reason = str(error).partition("\n")[0]
        raise EnvError(
            f"{env_id}: EnvPool cannot make it with the options {values_in(spec.kwargs)}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _check_options(spec: EnvSpec, config: dict[str, Any]) -> None:
    for key in spec.kwargs:
        if key in _OURS:
            raise EnvError(f"{spec.name}: TorchBeast sets {key}: remove it from env_kwargs")
        if key not in (known := [*config, "from_pixels"]):
            options = ", ".join(name for name in known if name not in _OURS)
            hint = did_you_mean(key, known)
            raise EnvError(f"{spec.name} has no option {key}{hint or '.'} It takes {options}")
