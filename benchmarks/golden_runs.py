# SPDX-License-Identifier: Apache-2.0
"""Prints a fingerprint of the weights that short reproducible runs end with.

usage: python benchmarks/golden_runs.py [NAME ...] > before.txt

A change that should not alter what is learned leaves every line as it was. Compare two commits on
one machine and one release of PyTorch: other ones round differently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from torchbeast import Learner, make_env
from torchbeast.core.envs import VecEnv
from torchbeast.schemes import Scheme

MONOBEAST = [sys.executable, "-m", "torchbeast.monobeast", "--seed=1", "--num_envs=4"]
LAG_ONE = ["--fixed_lag=1", "--env=CartPole-v1", "--total_steps=6000", "--unroll_length=20"]
LAG_ZERO = ["--fixed_lag=0", "--total_steps=3000", "--learn_start=500"]
PROGRAMS = {
    "impala": [*LAG_ONE, "--algo=impala", "--batch_size=4"],
    "laser": [*LAG_ONE, "--algo=laser", "--batch_size=4", "--replay_size=2000", "--replay_ratio=1"],
    "ppo": [*LAG_ONE, "--algo=ppo", "--batch_size=4"],
    "lstm": [*LAG_ONE, "--algo=impala", "--batch_size=4", "--use_lstm"],
    "dqn": [*LAG_ZERO, "--algo=dqn", "--env=CartPole-v1", "--n_step=1"],
    "sac": [*LAG_ZERO, "--algo=sac", "--env=Pendulum-v1"],
}


def _fingerprint(parts: Iterable[Tensor]) -> str:
    """Returns a hash of all bits of some tensors."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(
            part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:32]


def _of_program(flags: list[str]) -> str:
    """Trains MonoBeast and returns the fingerprint of its checkpoint's weights."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*MONOBEAST, *flags, f"--savedir={folder}", "--xpid=golden", "--suppress_logs"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        saved = torch.load(Path(folder, "golden", "model.tar"), weights_only=True)
    return _fingerprint(_tensors(saved))


def _tensors(nest: object) -> Iterable[Tensor]:
    """Yields the tensors of nested dicts and lists in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        for key in sorted(nest, key=str):
            yield from _tensors(nest[key])
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from _tensors(part)


def _of_scheme(architecture: str) -> str:
    """Trains with two synchronous gradient workers; returns the fingerprint of the weights."""
    envs, _, _ = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": "CartPole-v1"}, vec_env_size=4
    )
    scheme = Scheme.preset(architecture, envs)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        with Learner(scheme, 4096, log_dir=folder, seed=1) as learner:
            learner.train()
            return _fingerprint(learner.actor.state_dict().values())


RUNS: dict[str, Callable[[], str]] = {
    **{name: functools.partial(_of_program, flags) for name, flags in PROGRAMS.items()},
    **{name: functools.partial(_of_scheme, name) for name in ("dppo", "dd-ppo")},
}


if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        print(name, RUNS[name](), flush=True)
