# SPDX-License-Identifier: Apache-2.0
"""PPO on CartPole, built from components, in one process or with workers.

docs/explanation/schemes.md explains the components.

python examples/cartpole.py [seed] [workers]
"""

from __future__ import annotations

import statistics
import sys

from torchbeast import Learner, make_vec
from torchbeast.core.actors import OnPolicyActorCritic, get_feature_extractor
from torchbeast.core.algos import PPO
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.schemes import Scheme

NUM_ENVS = 8


def scheme(workers: int = 0) -> Scheme:
    """Returns PPO with the settings of Scheme.preset("ppo"). Workers share the environments."""
    envs = make_vec("CartPole-v1", NUM_ENVS // max(1, workers))
    return Scheme(
        train_envs_factory=envs,
        actor_factory=OnPolicyActorCritic.create_factory(
            envs.observation_space, envs.action_space, get_feature_extractor("MLP")
        ),
        algo_factory=PPO.create_factory(num_epochs=10, learning_rate=1e-3, grad_norm_clipping=0.5),
        storage_factory=OnPolicyGAEBuffer.create_factory(size=128),
        col_remote_workers=workers,
    )


def main(seed: int | None = None, workers: int = 0, target_steps: int = 100_000) -> None:
    """Trains an agent, then evaluates it in 100 episodes."""
    learner = Learner(scheme(workers), target_steps, seed=seed)
    while not learner.done():
        learner.step()
        if learner.updates % 25 == 0:
            learner.print_info()
    learner.print_info()
    returns = learner.evaluate(100).returns
    print(f"{learner.log_dir}: mean return of 100 episodes {statistics.fmean(returns):.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
