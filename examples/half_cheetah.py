# SPDX-License-Identifier: Apache-2.0
"""PPO on HalfCheetahBulletEnv-v0, built from components.

docs/explanation/schemes.md explains the components.

pip install 'torchbeast[pybullet]'
python examples/half_cheetah.py
"""

from __future__ import annotations

from typing import Any

from torchbeast import Learner
from torchbeast.core.actors import OnPolicyActorCritic, get_feature_extractor
from torchbeast.core.algos import PPO
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.envs import make_pybullet_train_env
from torchbeast.schemes import Scheme


def main(
    log_dir: str = "/tmp/half_cheetah", target_steps: int = 1000000, seed: int | None = None
) -> None:
    """Trains an agent, and saves it every ten updates."""
    # 1. Environments
    train_envs_factory, action_space, obs_space = VecEnv.create_factory(
        vec_env_size=1,
        log_dir=log_dir,
        env_fn=make_pybullet_train_env,
        env_kwargs={"env_id": "HalfCheetahBulletEnv-v0"},
    )

    # 2. Actor
    actor_factory = OnPolicyActorCritic.create_factory(
        obs_space, action_space, feature_extractor_network=get_feature_extractor("MLP")
    )

    # 3. Algorithm
    algo_factory = PPO.create_factory(
        lr=1e-4,
        num_epochs=4,
        clip_param=0.2,
        entropy_coef=0.01,
        value_loss_coef=0.5,
        max_grad_norm=0.5,
        num_mini_batch=4,
        use_clipped_value_loss=True,
        gamma=0.99,
    )

    # 4. Storage
    storage_factory = OnPolicyGAEBuffer.create_factory(size=1000, gae_lambda=0.95)

    # 5. Scheme: how the work is divided; here, everything is in one process
    params: dict[str, Any] = {
        "algo_factory": algo_factory,
        "actor_factory": actor_factory,
        "storage_factory": storage_factory,
        "train_envs_factory": train_envs_factory,
        "col_remote_workers": 0,
        "col_communication": "synchronous",
        "grad_remote_workers": 0,
        "grad_communication": "synchronous",
        "update_execution": "centralised",
    }
    scheme = Scheme(**params)

    # 6. Learner
    learner = Learner(scheme, target_steps=target_steps, log_dir=log_dir, seed=seed)
    iterations = 0
    while not learner.done():
        learner.step()
        learner.print_info()
        if iterations % 10 == 0:
            learner.save_model()
        iterations += 1


if __name__ == "__main__":
    main()
