# SPDX-License-Identifier: Apache-2.0
"""Lets an agent that has learnt Connect Four from games with itself play against a random player.

pip install 'torchbeast[pettingzoo]'
python -m torchbeast.monobeast --env pettingzoo:classic/connect_four_v3 --num_envs 32 \\
    --unroll_length 20 --batch_size 16 --learning_rate 0.001 --entropy_cost 0.01 \\
    --total_steps 3000000 --xpid connect-four
python examples/connect_four.py ~/logs/torchbeast/connect-four --games 100
"""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

import numpy as np

import torchbeast


def scores(run: str, games: int, seed: int) -> list[float]:
    """Returns what the agent won in each game: 1, 0 or -1; it begins in half of them."""
    agent, rng = torchbeast.load_agent(run), np.random.default_rng(seed)
    # Columns 2 g and 2 g + 1 are the two players of game g.
    is_ours = (np.arange(2 * games) + np.arange(2 * games) // 2) % 2 == 0
    found: dict[int, float] = {}
    with closing(torchbeast.make_env("pettingzoo:classic/connect_four_v3", 2 * games)) as env:
        observation: Any = env.reset(seed)
        reward: Any = None
        done: Any = False
        while len(found) < games:
            chosen = agent.act(observation, reward, done)
            at_random = [rng.choice(np.flatnonzero(mask)) for mask in observation["action_mask"]]
            step = env.step(np.where(is_ours, chosen, at_random))
            observation, reward, done = step.observation, step.reward, step.episode_end
            for column in np.flatnonzero(step.episode_end & is_ours).tolist():
                found.setdefault(column // 2, float(step.reward[column]))
    return list(found.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    won = scores(arguments.run, arguments.games, arguments.seed)
    print(f"won {won.count(1)}, drawn {won.count(0)}, lost {won.count(-1)} of {len(won)}")
