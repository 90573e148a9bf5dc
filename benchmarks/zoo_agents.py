# SPDX-License-Identifier: Apache-2.0
"""Writes the agent of a run to the zoo, as torchbeast/zoo/agents/NAME.pt, and plays it.

The file is a checkpoint that has only what acting needs. Matrices and filters are float16, which
halves the file; vectors and the statistics of observations keep their dtype.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import torchbeast
from torchbeast import zoo
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.base.checks import Trait, names_with
from torchbeast.envs.spec import EnvSpec
from torchbeast.evaluation.play import NEEDED, env_of
from torchbeast.reporting.run_folder import CHECKPOINT, read_meta, write_atomically
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.episodes import Episodes, play

MOST_BYTES = 300_000
PARALLEL, SEED = 16, 0  # of the episodes that are played
_OF_MACHINE: tuple[Trait, ...] = ("command", "incidental", "rank")
_LABELS = (
    "format",
    "model",
    "model_kwargs",
    "reward_input",
    "reads_values",
    "observation_space",
    "action_space",
    "frame_stack",
)


def save(run: Path, name: str) -> Path:
    """Writes the newest weights of a run as the agent of a preset; returns the file.

    Raises ValueError if it is larger than MOST_BYTES.
    """
    data = checkpoints.as_bytes(policy_of(checkpoints.load(run / CHECKPOINT)))
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{name}: the agent has {len(data):,} bytes, expected at most {MOST_BYTES:,}"
        )
    path = zoo.AGENTS / f"{name}.pt"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, data)
    return path


def policy_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a checkpoint that acting needs, and its step."""
    flags, weights = checkpoint["flags"], checkpoint["model_state_dict"]
    left_out = set().union(*(names_with(trait, MonoBeastFlags) for trait in _OF_MACHINE)) - {"seed"}
    return {
        **{label: checkpoint[label] for label in _LABELS},
        "stats": {"step": checkpoint["stats"]["step"]},
        "flags": {name: value for name, value in flags.items() if name not in left_out},
        "model_state_dict": {name: _rounded(weight) for name, weight in weights.items()},
    }


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    is_matrix = weight.dtype == torch.float32 and weight.dim() > 1
    return weight.half() if is_matrix else weight


def row(run: Path, name: str) -> dict[str, Any]:
    """Returns the entry "agent" of a record, for an agent that `save` has saved from this run."""
    meta, played = read_meta(run), episodes(name, 100)
    return {
        "seed": meta["args"]["seed"],
        "score": round(statistics.fmean(played.returns), 3),
        "spread": round(played.spread, 3),
        "commit": meta["git"]["commit"][:10],
    }


def episodes(name: str, num_episodes: int) -> Episodes:
    """Plays greedy episodes with an agent of the zoo, in this process."""
    saved = checkpoints.load(zoo.agent_path(name), NEEDED)
    agent = torchbeast.load_agent(f"zoo:{name}").agent
    spec = env_of(saved, EnvSpec(""))
    with closing(torchbeast.make_env(spec, min(num_episodes, PARALLEL))) as env:
        return play(env, agent, num_episodes, SEED)
