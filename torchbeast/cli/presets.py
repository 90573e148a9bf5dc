# SPDX-License-Identifier: Apache-2.0
"""Presets: tuned settings for a task, which `--preset NAME` makes the defaults.

Their results are in docs/results/. Flags on the command line override the preset.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torchbeast.cli.resuming import given
from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError


class Preset(NamedTuple):
    """The settings of one task."""

    sentence: str
    words: str
    """Flags as on the command line. A program ignores the flags that it lacks."""

    @property
    def flags(self) -> dict[str, Any]:
        """The values of the flags, by their names."""
        each = pairwise([*shlex.split(self.words), "--"])
        return {word[2:]: _value(next_one) for word, next_one in each if word.startswith("--")}


def _value(word: str) -> Any:
    """Returns the value of a flag; word: the one after the flag."""
    if word.startswith("--"):
        return True
    if word == "None":
        return None
    try:
        return json.loads(word)
    except ValueError:
        return word


_TOY = "--num_envs 16 --unroll_length 20 --batch_size 8 --entropy_cost 0.01"
_CARTPOLE = (
    "--env CartPole-v1 --num_envs 16 --unroll_length 20 --batch_size 16 --learning_rate 0.002"
)
_ATARI = "--env PongNoFrameskip-v4 --num_envs 32 --unroll_length 20 --reward_clipping abs_one"
_SMALL_NETWORK = """--model_kwargs '{"hidden": 64}'"""
_LINEAR = "--learning_rate_schedule linear"  # where the algorithm's default is, or may be, another
_WITH_NORM = """--model_kwargs '{"norm": true}'"""
_PLAIN = """--model_kwargs '{"orthogonal": false}'"""
_AS_GIVEN = "--normalise_returns false"

PRESETS: dict[str, Preset] = {
    "catch": Preset(
        "Catch a falling ball. Trains in seconds.",
        f"{_TOY} --env Catch --learning_rate 0.003 {_AS_GIVEN} --total_steps 50000",
    ),
    "memory": Preset(
        "Remember a cue for eight steps, with an LSTM.",
        # With rates of 0.003 and 0.99 a third of the runs temporarily forgot what they had learnt.
        f"{_TOY} --env Memory --use_lstm --learning_rate 0.001 --discounting 0.9 "
        f"{_AS_GIVEN} --total_steps 30000",
    ),
    "multidiscrete": Preset(
        "Set three dials together, with MultiDiscrete actions.",
        f"{_TOY} --env Dials --learning_rate 0.003 --reward_scale 10.0 --total_steps 80000",
    ),
    "cartpole": Preset(
        "CartPole-v1: 500 steps upright.",
        # The entropy cost is in units of the scaled rewards, whose advantages are near 0 once
        # episodes are long: with 0.01 the bonus then made solved policies random again.
        f"{_CARTPOLE} --entropy_cost 0.001 --reward_scale 0.1 --total_steps 250000",
    ),
    "cartpole-ppo": Preset(
        "CartPole-v1 with PPO.",
        "--algo ppo --env CartPole-v1 --num_envs 8 --batch_size 8 --unroll_length 128 "
        f"--fixed_lag None --num_epochs 4 --learning_rate 0.001 --shared_body {_PLAIN} "
        # The value loss is clipped for rewards of this scale.
        f"{_LINEAR} --grad_norm_clipping 0.5 --reward_scale 0.1 --use_clipped_value_loss "
        "--total_steps 150000",
    ),
    "cartpole-lstm": Preset(
        "CartPole-v1 with an LSTM.",
        f"{_CARTPOLE} --use_lstm --entropy_cost 0.01 {_AS_GIVEN} --total_steps 600000",
    ),
    "pendulum": Preset(
        "Pendulum-v1, continuous actions.",
        "--env Pendulum-v1 --num_envs 32 --unroll_length 20 --batch_size 32 "
        "--learning_rate 0.001 --epsilon 0.03 --entropy_cost 0.002 --discounting 0.95 "
        "--reward_scale 0.02 --reward_clipping none --total_steps 1200000",
    ),
    "cartpole-dqn": Preset(
        "CartPole-v1 with double DQN.",
        f"--algo dqn --env CartPole-v1 --num_envs 4 {_SMALL_NETWORK} --batch_size 128 "
        # The loss is linear in errors above 1. Without a scale the error of every fall is near
        # 100, so that falls, which are rare, count for little.
        f"--replay_ratio 32.0 --n_step 3 --learning_rate 0.001 {_LINEAR} --reward_scale 0.02 "
        "--target_period 50 --exploration_steps 10000 --epsilon_end 0.04 --total_steps 50000",
    ),
    "pendulum-sac": Preset(
        "Pendulum-v1 with SAC.",
        f"--algo sac --env Pendulum-v1 --num_envs 2 {_SMALL_NETWORK} --batch_size 128 "
        f"--replay_ratio 128.0 --learning_rate 0.002 {_LINEAR} --learn_start 1000 "
        "--total_steps 15000",
    ),
    "bitflip-hindsight": Preset(
        "Flip ten bits to match a goal, with DQN and hindsight replay, which the task requires.",
        f"--algo dqn --env BitFlip --num_envs 8 {_SMALL_NETWORK} --batch_size 64 --replay_ratio "
        f"32.0 --learning_rate 0.002 {_LINEAR} --discounting 0.98 --target_period 50 "
        "--exploration_steps 5000 --hindsight_share 0.8 --total_steps 30000",
    ),
    "minatar-breakout-dqn": Preset(
        "MinAtar's Breakout with double DQN.",
        "--algo dqn --env MinAtar/Breakout-v1 --num_envs 8 --n_step 3 --learning_rate 0.0005 "
        f"{_LINEAR} --target_period 1000 --learn_start 5000 --exploration_steps 100000 "
        "--epsilon_end 0.02 "
        "--total_steps 1000000",
    ),
    "halfcheetah-sac": Preset(
        "MuJoCo's HalfCheetah-v5 with SAC.",
        "--algo sac --env HalfCheetah-v5 --num_envs 2 --learning_rate 0.001 "
        f"{_LINEAR} --replay_ratio 128.0 --total_steps 200000",
    ),
    "minatar-breakout": Preset(
        "MinAtar's Breakout.",
        f"--env MinAtar/Breakout-v1 {_WITH_NORM} --num_envs 64 --unroll_length 20 "
        f"--batch_size 32 --learning_rate 0.003 --entropy_cost 0.03 --discounting 0.97 {_AS_GIVEN} "
        "--total_steps 1000000",
    ),
    "minatar-breakout-ppo": Preset(
        "MinAtar's Breakout with PPO.",
        "--algo ppo --env MinAtar/Breakout-v1 --num_envs 32 --unroll_length 64 --batch_size 32 "
        f"--fixed_lag None --num_epochs 4 --learning_rate 0.001 {_LINEAR} --entropy_cost 0.01 "
        "--grad_norm_clipping 0.5 "
        f"""--model_kwargs '{{"norm": true, "orthogonal": false}}' {_AS_GIVEN} """
        "--total_steps 1000000",
    ),
    "minatar-breakout-pqn": Preset(
        "MinAtar's Breakout with PQN.",
        "--algo pqn --env MinAtar/Breakout-v1 --num_envs 64 --batch_size 64 "
        "--num_mini_batch 16 --exploration_steps 100000 --total_steps 1000000",
    ),
    "pong": Preset(
        "Pong with the shallow-norm network. Takes an hour on two cores and wins most games.",
        f"{_ATARI} --model shallow-norm --batch_size 8 --learning_rate 0.0004 --warmup_steps 20000 "
        "--epsilon 0.00001 --entropy_cost 0.003 --total_steps 2000000",
    ),
    "atari-paper": Preset(
        "Atari as in the IMPALA paper, 200 million frames. Select the game with --env. Not tested "
        "yet.",
        f"{_ATARI} --model deep --batch_size 32 --learning_rate 0.0006 --entropy_cost 0.01 "
        # The paper's epsilon of 0.01 is inside TensorFlow's root, so that small gradients are
        # divided by 0.1. TensorFlow's average starts at 1 and needs about 500 updates to forget it.
        "--epsilon 0.1 --warmup_steps 320000 --total_steps 50000000",
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
    name = name.lower()
    if name not in PRESETS:
        known, hint = ", ".join(PRESETS), did_you_mean(name, PRESETS)
        raise UsageError(f"there is no preset {name!r}: use {known}, or help for a list{hint}")
    return PRESETS[name].flags


def listing() -> str:
    """Describes every preset with its settings, in lines that fit the terminal."""
    width = shutil.get_terminal_size().columns - len("   \\")
    lines = []
    for name, preset in PRESETS.items():
        flags = re.sub(" (?!--)", "\0", preset.words)  # a value stays on the line of its flag
        commands = textwrap.wrap(flags, width, break_on_hyphens=False)
        lines += [name, *(f"  {line}" for line in textwrap.wrap(preset.sentence, width))]
        lines.append("  " + " \\\n  ".join(commands).replace("\0", " "))
    return "\n".join(lines)
