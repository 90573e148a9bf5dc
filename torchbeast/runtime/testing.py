# SPDX-License-Identifier: Apache-2.0
"""`--mode test` and `test_render` of every program: plays with the checkpoint of a run.

Checkpoints of the original TorchBeast are played too. They do not name their network: its weights
do.
"""

from __future__ import annotations

import secrets
from collections.abc import Container
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.runtime import checkpoint as checkpoints
from torchbeast.runtime.agent import Agent, make_agent
from torchbeast.runtime.environment import make_environment, what_it_raised
from torchbeast.runtime.errors import EXIT_DONE, RunError, UsageError
from torchbeast.runtime.evaluation import MAX_PARALLEL, Episodes, play, report
from torchbeast.runtime.flags import RunFlags


def test(run: RunFlags) -> int:
    """Plays whole episodes, prints their returns; writes a video when the mode says so."""
    path = run.folder / "model.tar"
    saved = checkpoints.load(path, needed=("model_state_dict", "flags"))
    render = run.mode == "test_render"
    with closing(_environment(saved["flags"], run.num_episodes, render)) as env:
        agent = _agent(saved, env, path)
        seed = secrets.randbits(31) if run.seed is None else run.seed
        torch.manual_seed(seed)
        try:
            episodes = _play(env, agent, run, seed)
        except (UsageError, RunError):
            raise
        except Exception as error:
            raise RunError(f"while playing {env.env_id}: {what_it_raised(error)}") from error
    print(f"{env.env_id}, {path}, {_how(saved, run)}\n{report(episodes)}")
    return EXIT_DONE


def _how(saved: dict[str, Any], run: RunFlags) -> str:
    step = saved.get("stats", {}).get("step")
    actions = "sampled actions" if run.sampled else "the most likely actions"
    return actions if step is None else f"step {int(step):,}, {actions}"


def _play(env: VecEnv, agent: Agent, run: RunFlags, seed: int) -> Episodes:
    greedy = not run.sampled
    if run.mode != "test_render":
        return play(env, agent, run.num_episodes, seed, greedy=greedy)
    from torchbeast.runtime.video import VideoWriter, picture  # OpenCV, which nothing else needs

    with VideoWriter(run.folder / "video.mp4") as video:

        def film(observation: Any) -> None:
            video.write(picture(env, observation))

        episodes = play(env, agent, run.num_episodes, seed, watch=film, greedy=greedy)
    print(f"The video is {video.path}")
    return episodes


def _environment(flags: dict[str, Any], num_episodes: int, render: bool) -> VecEnv:
    env_id = flags.get("env")
    if not env_id or env_id == "unknown":
        raise UsageError("the checkpoint does not say which environment it was trained on")
    return make_environment(env_id, 1 if render else min(num_episodes, MAX_PARALLEL), render)


def _agent(saved: dict[str, Any], env: VecEnv, path: Path) -> Agent:
    flags, weights = saved["flags"], saved["model_state_dict"]
    agent = make_agent(
        flags.get("model") or _original_model(weights),
        env.observation_space,
        env.action_space,
        env.frame_stack,
        bool(flags.get("use_lstm", "core.weight_ih_l0" in weights)),
    )
    checkpoints.load_model(agent.model, saved, path)
    agent.model.eval()
    return agent


def _original_model(weights: Container[str]) -> str:
    """The network by the names of its weights."""
    names = {"conv1.weight": "shallow", "feat_convs.0.0.weight": "deep"}
    return next((model for name, model in names.items() if name in weights), "auto")
