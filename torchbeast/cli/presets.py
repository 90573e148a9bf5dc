# SPDX-License-Identifier: Apache-2.0
"""Presets: tuned settings for a task, which `--preset NAME` makes the defaults.

Their results are in docs/results/. Flags on the command line override the preset.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchbeast.cli.resuming import given
from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError


class Preset(NamedTuple):
    """The settings of one task."""

    sentence: str
    flags: Mapping[str, Any]
    """By name on the command line. A program ignores flags that it does not have."""


_TOY = {"num_actors": 16, "unroll_length": 20, "batch_size": 8, "entropy_cost": 0.01}
_CARTPOLE = {
    "env": "CartPole-v1",
    "num_actors": 16,
    "unroll_length": 20,
    "batch_size": 16,
    "learning_rate": 0.002,
}
_ATARI = {
    "env": "PongNoFrameskip-v4",
    "num_actors": 32,
    "unroll_length": 20,
    "batch_size": 32,
    "learning_rate": 0.0006,
    "entropy_cost": 0.01,
    "reward_clipping": "abs_one",
}

PRESETS: dict[str, Preset] = {
    "catch": Preset(
        "Catch a falling ball: learnt in seconds.",
        {**_TOY, "env": "Catch", "learning_rate": 0.003, "total_steps": 50_000},
    ),
    "memory": Preset(
        "Remember a cue for eight steps, with an LSTM.",
        {
            **_TOY,
            "env": "Memory",
            "use_lstm": True,
            # With 0.003 and 0.99 a third of the runs temporarily forgot what they had learnt.
            "learning_rate": 0.001,
            "discounting": 0.9,
            "total_steps": 30_000,
        },
    ),
    "multidiscrete": Preset(
        "Set three dials together, with MultiDiscrete actions.",
        {
            **_TOY,
            "env": "Dials",
            "learning_rate": 0.003,
            "reward_scale": 10.0,
            "total_steps": 80_000,
        },
    ),
    "cartpole": Preset(
        "CartPole-v1: 500 steps upright.",
        {
            **_CARTPOLE,
            # In units of the scaled rewards, whose advantages are near 0 once episodes are long:
            # with 0.01 the bonus then made solved policies random again.
            "entropy_cost": 0.001,
            "reward_scale": 0.1,
            "total_steps": 250_000,
        },
    ),
    "cartpole-ppo": Preset(
        "CartPole-v1 with PPO.",
        {
            "algo": "ppo",
            "env": "CartPole-v1",
            "num_actors": 8,
            "unroll_length": 128,
            "learning_rate": 0.001,
            "grad_norm_clipping": 0.5,
            "reward_scale": 0.1,
            "use_clipped_value_loss": True,  # of rewards of this scale
            "total_steps": 150_000,
        },
    ),
    "cartpole-lstm": Preset(
        "CartPole-v1 with an LSTM.",
        {**_CARTPOLE, "use_lstm": True, "entropy_cost": 0.01, "total_steps": 600_000},
    ),
    "pendulum": Preset(
        "Pendulum-v1, continuous actions.",
        {
            "env": "Pendulum-v1",
            "num_actors": 32,
            "unroll_length": 20,
            "batch_size": 32,
            "learning_rate": 0.001,
            "epsilon": 0.03,
            "entropy_cost": 0.002,
            "discounting": 0.95,
            "reward_scale": 0.02,
            "reward_clipping": "none",
            "total_steps": 1_200_000,
        },
    ),
    "cartpole-dqn": Preset(
        "CartPole-v1 with double DQN.",
        {
            "algo": "dqn",
            "env": "CartPole-v1",
            "num_actors": 4,
            "model_kwargs": {"hidden": 64},
            "batch_size": 128,
            "replay_ratio": 32.0,
            "n_step": 3,
            "learning_rate": 0.001,
            # The loss is linear in errors above 1. Without a scale the error of every fall is near
            # 100, so that falls, which are rare, count for little.
            "reward_scale": 0.02,
            "target_period": 50,
            "exploration_steps": 10_000,
            "epsilon_end": 0.04,
            "total_steps": 50_000,
        },
    ),
    "pendulum-sac": Preset(
        "Pendulum-v1 with SAC.",
        {
            "algo": "sac",
            "env": "Pendulum-v1",
            "num_actors": 2,
            "model_kwargs": {"hidden": 64},
            "batch_size": 128,
            "replay_ratio": 128.0,
            "learning_rate": 0.002,
            "learn_start": 1_000,
            "total_steps": 15_000,
        },
    ),
    "bitflip-hindsight": Preset(
        "Flip ten bits to match a goal, with DQN and hindsight, which it needs to learn.",
        {
            "algo": "dqn",
            "env": "BitFlip",
            "num_actors": 8,
            "model_kwargs": {"hidden": 64},
            "batch_size": 64,
            "replay_ratio": 32.0,
            "learning_rate": 0.002,
            "discounting": 0.98,
            "target_period": 50,
            "exploration_steps": 5_000,
            "hindsight_share": 0.8,
            "total_steps": 30_000,
        },
    ),
    "minatar-breakout-dqn": Preset(
        "MinAtar's Breakout with double DQN.",
        {
            "algo": "dqn",
            "env": "MinAtar/Breakout-v1",
            "num_actors": 8,
            "n_step": 3,
            "learning_rate": 0.0005,
            "target_period": 1_000,
            "learn_start": 5_000,
            "exploration_steps": 100_000,
            "epsilon_end": 0.02,
            "total_steps": 1_000_000,
        },
    ),
    "halfcheetah-sac": Preset(
        "MuJoCo's HalfCheetah-v5 with SAC.",
        {
            "algo": "sac",
            "env": "HalfCheetah-v5",
            "num_actors": 2,
            "learning_rate": 0.001,
            "replay_ratio": 128.0,
            "total_steps": 200_000,
        },
    ),
    "minatar-breakout": Preset(
        "MinAtar's Breakout.",
        {
            "env": "MinAtar/Breakout-v1",
            "model_kwargs": {"norm": True},
            "num_actors": 64,
            "unroll_length": 20,
            "batch_size": 32,
            "learning_rate": 0.003,
            "entropy_cost": 0.03,
            "discounting": 0.97,
            "total_steps": 1_000_000,
        },
    ),
    "minatar-breakout-ppo": Preset(
        "MinAtar's Breakout with PPO.",
        {
            "algo": "ppo",
            "env": "MinAtar/Breakout-v1",
            "model_kwargs": {"norm": True},
            "num_actors": 32,
            "unroll_length": 64,
            "batch_size": 32,
            "learning_rate": 0.001,
            "entropy_cost": 0.01,
            "grad_norm_clipping": 0.5,
            "total_steps": 1_000_000,
        },
    ),
    "minatar-breakout-pqn": Preset(
        "MinAtar's Breakout with PQN.",
        {
            "algo": "pqn",
            "env": "MinAtar/Breakout-v1",
            "num_actors": 64,
            "batch_size": 64,
            "num_mini_batch": 16,
            "exploration_steps": 100_000,
            "total_steps": 1_000_000,
        },
    ),
    "pong": Preset(
        "Pong with the shallow-norm network: takes an hour on two cores, and wins most games.",
        {
            **_ATARI,
            "model": "shallow-norm",
            "batch_size": 8,
            "learning_rate": 0.0004,
            "warmup_steps": 20_000,
            "epsilon": 0.00001,
            "entropy_cost": 0.003,
            "total_steps": 2_000_000,
        },
    ),
    "atari-paper": Preset(
        "Atari as in the IMPALA paper, 200 million frames; give the game with --env. Not run yet.",
        {
            **_ATARI,
            "model": "deep",
            # The paper's 0.01 is inside TensorFlow's root, so that small gradients are divided by
            # 0.1.
            "epsilon": 0.1,
            # TensorFlow's average starts at 1 and needs about 500 updates to forget it.
            "warmup_steps": 320_000,
            "total_steps": 50_000_000,
        },
    ),
}


def settings(args: Sequence[str]) -> Mapping[str, Any]:
    """Returns the flags of the preset that `args` names, by name on the command line.

    Raises UsageError for an unknown preset. `--preset help` prints all presets and exits. Only
    programs that train have presets.
    """
    name = given(args, "--preset")
    if name is None:
        return {}
    if name == "help":
        print(listing())
        raise SystemExit(0)
    if name not in PRESETS:
        known, hint = ", ".join(PRESETS), did_you_mean(name, PRESETS)
        raise UsageError(f"there is no preset {name!r}: use {known}, or help for a list{hint}")
    return PRESETS[name].flags


def listing() -> str:
    """Describes every preset with its settings."""
    return "\n".join(
        f"{name}\n  {preset.sentence}\n  {_words(preset)}" for name, preset in PRESETS.items()
    )


def _words(preset: Preset) -> str:
    """Returns the settings as words of a command line."""
    words = []
    for name, value in preset.flags.items():
        text = shlex.quote(json.dumps(value)) if isinstance(value, Mapping) else str(value)
        words.append(f"--{name}" if value is True else f"--{name} {text}")
    return " ".join(words)
