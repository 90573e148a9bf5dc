# SPDX-License-Identifier: Apache-2.0
"""Settings of a run: hardware, training length, checkpoints, reward clipping and evaluation; and
the settings that it records, in its checkpoints and in meta.json, by the names of flags.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchbeast.core.base.checks import Settings, at_least, check_device, require, setting
from torchbeast.core.base.specs import Precision, RewardClipping
from torchbeast.envs.spec import EnvSpec, plays_atari
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import CHECKPOINT
from torchbeast.zoo import PRESETS


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Settings):
    """Devices, threads and precision of the learner."""

    num_learner_threads: int | None = setting(None, bounds=(at_least, 1))
    """Learner threads, which take turns preparing batches and updating. Alias: --num_threads.
    Default: 2 with a GPU (one copies data while the other computes), else 1; 1 with
    --fixed_lag."""
    torch_threads: int | None = setting(None, "rank", bounds=(at_least, 1))
    """Number of CPU threads per update. Each thread computes gradients of slices of the batch; the
    order of their sum is not fixed. Default: the cores that this process may use; 1 with
    --fixed_lag, and if a batch has less than about 1 MB of observations and the network is small.
    With --fixed_lag, threads are used inside PyTorch's operations instead, and rounding depends on
    their number."""
    precision: Precision = "auto"
    """Floating-point type of the network's features; everything else is float32. auto: bfloat16 if
    the hardware supports it (AMX, AVX512-BF16, tensor cores), but float32 for your own networks,
    for small networks on the CPU and with --fixed_lag."""
    megabytes_at_once: float | None = setting(None, bounds=(at_least, 0))
    """Size of the slices in which gradients are accumulated, in MB of observations; 0: the whole
    batch. Smaller slices fit the cache, larger ones have less overhead; the gradient is the same.
    Default: 2.7 on the CPU, the whole batch on a GPU."""
    compile: bool = False
    """Compile the network with torch.compile for updates. Needs a C++ compiler and a minute or more
    at startup. Measurements showed no speedup on the CPU."""
    device: str = setting("auto", "rank", bounds=(check_device,))
    """Device of the learner: cpu; cuda, the first GPU; cuda:1, the GPU with this number; auto, the
    first GPU, or the CPU if there is none. With several learners under torchrun, auto and cuda give
    each its own GPU."""
    disable_cuda: bool = False
    """Use the CPU even if there is a GPU; the same as --device cpu."""
    write_profiler_trace: bool = setting(False, "incidental")
    """Profile the fifth update of the program and write trace.json (for chrome://tracing) to the
    run's folder. Slows that update down."""

    @property
    def stays_on_cpu(self) -> bool:
        """Whether no GPU is used, even if there is one."""
        return self.disable_cuda or self.device == "cpu"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """Length of training. A step is one action in one environment (four Atari frames)."""

    total_steps: int = setting(100_000, bounds=(at_least, 1))
    """Environment steps to train for. Schedules, such as the learning rate's, end there."""


FIRST_CHECKPOINT_S = 60.0
"""Seconds until the first checkpoint at most, so that a run that is killed early can be resumed."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Settings):
    """Checkpoints."""

    disable_checkpoint: bool = setting(False, "incidental")
    """Do not write checkpoints. The run can then be neither resumed nor evaluated."""
    checkpoint_interval: float = setting(600.0, "incidental", bounds=(at_least, 1))
    """Seconds between checkpoints. One is also written after the first minute, at the end, and on
    Ctrl-C, SIGTERM and SIGHUP."""
    keep_checkpoints: int = setting(3, "incidental", bounds=(at_least, 1))
    """Checkpoints to keep: model.tar is the newest, model.1.tar the one before it, and so on. If
    model.tar is damaged, the run resumes from model.1.tar."""


@dataclass(frozen=True, kw_only=True)
class CallbacksConfig(Settings):
    """Evaluations and callbacks during training."""

    eval_every: int | None = setting(None, bounds=(at_least, 1))
    """Environment steps between evaluations, during which training pauses. Each evaluation appends
    a row to evaluations.csv and adds evaluation_mean_return to the log; the best weights are kept
    as evaluation_best.tar. The final weights are evaluated too. Default: no evaluations."""
    eval_episodes: int = setting(10, bounds=(at_least, 1))
    """Number of episodes per evaluation of --eval_every, played with deterministic actions; with
    several tasks, of each."""
    callback: tuple[str, ...] = ()
    """Your own callbacks as package.module:Class: subclasses of torchbeast.learner.Callback that
    take no arguments, or functions that return a callback. A resumed run keeps them."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Settings):
    """Evaluation of a run's checkpoints."""

    follow: bool = setting(False, "command")
    """With --mode test: evaluate every new model.tar while the run trains, append a row for each to
    evaluations.csv, keep the best as evaluation_best.tar, and exit when the run ends. --seed is 0
    by default, so that all checkpoints are evaluated from the same initial states."""
    checkpoint: str = setting(CHECKPOINT, "command")
    """Checkpoint in the run's folder to evaluate with --mode test, for example evaluation_best.tar
    or model.1.tar."""
    num_episodes: int = setting(10, "command", bounds=(at_least, 1))
    """Number of episodes in --mode test; with several tasks, of each. More episodes give a less
    noisy mean."""
    sampled: bool = setting(False, "command")
    """In --mode test, sample actions from the policy as in training, instead of acting greedily. It
    changes nothing with dqn, pqn, r2d2 and td3."""
    random_start: int | None = setting(None, "command", bounds=(at_least, 0))
    """Start each episode of --mode test with 0 to this many random actions. Without them, greedy
    play in a deterministic game repeats one episode. Default: 30 in Atari games, else 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.follow or self.checkpoint == CHECKPOINT,
            f"follow evaluates every new {CHECKPOINT}: remove --checkpoint {self.checkpoint}",
        )


UNKNOWN = "unknown"  # the environment of servers of TorchBeast 2019, which do not name it


def resolved(clipping: Literal["auto", RewardClipping], env_id: str) -> RewardClipping:
    """Returns the clipping to use; "auto" is resolved by the environment.

    Rewards of Atari games are clipped, because their scores have very different scales, from 1 in
    Pong to thousands. Elsewhere the size of a reward is meaningful: clipping would make Taxi's -10
    for a forbidden action equal to the -1 of every other step. In an unknown environment rewards
    are clipped, because that was the default of TorchBeast 2019.
    """
    if clipping != "auto":
        return clipping
    return "abs_one" if env_id == UNKNOWN or plays_atari(env_id) else "none"


def hint_of_settings(env_id: str, algo: str, are_defaults: bool) -> str:
    """Returns a message about better settings for the start of a run without a preset, or "".

    are_defaults: whether the settings are IMPALA's defaults.
    """
    if tuned := [name for name, preset in PRESETS.items() if preset.task == (env_id, algo)]:
        return f"Tip: tuned settings for {env_id} with {algo}: --preset {' or '.join(tuned)}"
    if not are_defaults or env_id == UNKNOWN or plays_atari(env_id):
        return ""
    return (
        "These are the default settings, which suit Atari games. If the agent does not learn, try "
        "the settings of a similar task (--preset help lists them) or --algo ppo."
    )


# Recorded separately: keyword arguments of a "module:attribute" that running servers reported.
SERVED_KWARGS = "served_env_kwargs"


def recorded_env(env: EnvSpec, others_serve: bool) -> dict[str, Any]:
    """Returns the entries that record the environment's name and keyword arguments.

    others_serve: whether running servers decide the environment. The arguments that they report for
    a "module:attribute" are recorded separately, because a server could report anything.
    """
    kwargs = dict(env.kwargs)
    if others_serve and env.is_factory:
        return {"env": env.name, "env_kwargs": {}, SERVED_KWARGS: kwargs}
    return {"env": env.name, "env_kwargs": kwargs}


def naming_flags(recorded: Mapping[str, Any]) -> list[str]:
    """Returns the flags with which a command passes `check_named` for these settings."""
    name = recorded.get("env") or ""
    served, kwargs = recorded.get(SERVED_KWARGS), recorded.get("env_kwargs")
    if not (served or kwargs) or not EnvSpec(name).is_factory:
        return []
    return ["--env", name, *(["--env_kwargs", json.dumps(served)] if served else [])]


def check_named(recorded: Mapping[str, Any], asked: EnvSpec) -> None:
    """Raises UsageError if a "module:attribute" would get keyword arguments that nobody typed.

    recorded: the settings of a checkpoint or of meta.json. These files can come from anyone, and
    os:system with arguments of their choice would run any command. Without arguments it is called
    in any case: a foreign checkpoint can call functions of this machine's modules, but not pass
    arguments to them. asked: the environment that the command line names; an empty name or empty
    arguments stand for the recorded ones.
    """
    name, needed = recorded.get("env") or "", naming_flags(recorded)
    if not needed or asked.kwargs or asked.name not in ("", name):
        return
    if not asked.name or "--env_kwargs" in needed:
        kwargs = json.dumps(_env_kwargs(recorded))
        raise UsageError(
            "recorded env_kwargs are only used for functions named on the command line: if you "
            f"trust this run to call {name} with {kwargs}, add {shlex.join(needed)}"
        )


def _env_kwargs(settings: Mapping[str, Any]) -> Any:
    """Returns the environment's keyword arguments, from servers or flags; {} in old records."""
    return settings.get(SERVED_KWARGS) or settings.get("env_kwargs", {})


def changes(
    recorded: Mapping[str, Any], now: Mapping[str, Any], of_command: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Returns [before, now] for each setting of a resumed run that differs from the recorded one.

    It skips settings that were not recorded, for example by another program, the settings
    `of_command`, which do not belong to a run, and the model, which cannot change.
    """
    if recorded:
        recorded = {**recorded, "env_kwargs": _env_kwargs(recorded)}
    if "env_kwargs" in now:
        now = {**now, "env_kwargs": _env_kwargs(now)}
    pairs = {
        name: [_plain(recorded[name]), _plain(value)]
        for name, value in now.items()
        if name in recorded and name not in (*of_command, SERVED_KWARGS, "model")
    }
    return {name: [before, value] for name, (before, value) in pairs.items() if before != value}


def _plain(value: Any) -> Any:
    """Converts a value so that values of the command line and of JSON can be compared."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    return list(value) if isinstance(value, tuple) else value
