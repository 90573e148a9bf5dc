# SPDX-License-Identifier: Apache-2.0
"""`--mode test` and `test_render` of every program: plays with the checkpoint of a run."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.runtime import checkpoint as checkpoints
from torchbeast.runtime.agent import Agent, make_agent
from torchbeast.runtime.environment import make_environment, what_it_raised
from torchbeast.runtime.errors import EXIT_DONE, RunError, UsageError
from torchbeast.runtime.evaluation import MAX_PARALLEL, play, report
from torchbeast.runtime.flags import RunFlags


def test(run: RunFlags) -> int:
    """Plays whole episodes, prints their returns; writes a video when the mode says so."""
    path = run.folder / "model.tar"
    saved = checkpoints.load(path)
    render = run.mode == "test_render"
    with closing(_environment(saved["flags"], run.num_episodes, render)) as env:
        agent = _agent(saved, env, path)
        seed = secrets.randbits(31) if run.seed is None else run.seed
        torch.manual_seed(seed)
        try:
            returns = _play(env, agent, run, seed)
        except (UsageError, RunError):
            raise
        except Exception as error:
            raise RunError(f"while playing {env.env_id}: {what_it_raised(error)}") from error
    print(f"{env.env_id}, {path}, step {saved['stats'].get('step', 0):,}\n{report(returns)}")
    return EXIT_DONE


def _play(env: VecEnv, agent: Agent, run: RunFlags, seed: int) -> list[float]:
    if run.mode != "test_render":
        return play(env, agent, run.num_episodes, seed)
    from torchbeast.runtime.video import VideoWriter  # needs OpenCV, which nothing else does

    with VideoWriter(run.folder / "video.mp4") as video:
        returns = play(env, agent, run.num_episodes, seed, watch=video.write)
    print(f"The video is {video.path}")
    return returns


def _environment(flags: dict[str, Any], num_episodes: int, render: bool) -> VecEnv:
    env_id = flags.get("env")
    if not env_id or env_id == "unknown":
        raise UsageError("the checkpoint does not say which environment it was trained on")
    return make_environment(env_id, 1 if render else min(num_episodes, MAX_PARALLEL))


def _agent(saved: dict[str, Any], env: VecEnv, path: Path) -> Agent:
    flags = saved["flags"]
    agent = make_agent(
        flags.get("model", "auto"),
        env.observation_space,
        env.action_space,
        env.frame_stack,
        bool(flags.get("use_lstm")),
    )
    checkpoints.load_model(agent.model, saved, path)
    agent.model.eval()
    return agent
