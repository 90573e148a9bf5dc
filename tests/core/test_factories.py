# SPDX-License-Identifier: Apache-2.0
"""Factories check their hyperparameters at once, and make what they say."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from torchbeast import EnvSpec, make_env
from torchbeast.core.actors import OffPolicyActorCritic, OnPolicyActorCritic, get_feature_extractor
from torchbeast.core.actors.networks import AtariNet, DeepNet, FixupNet, MLPNet
from torchbeast.core.actors.off_policy import QNet, SACNet
from torchbeast.core.actors.torsos import FixupTorso
from torchbeast.core.algos import DDQN, DQN, IMPALA, LASER, PPO, R2D2, SAC, TD3
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import OTHER_NAMES, PPOConfig, StepConfig, recorded, usual_of
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.storages import (
    HindsightExperienceReplayBuffer,
    OnPolicyBuffer,
    OnPolicyGAEBuffer,
    OnPolicyVTraceBuffer,
    ReplayBuffer,
    RolloutReplayBuffer,
)
from torchbeast.errors import IncompatibleParts
from torchbeast.run.episodes import Episodes

FRAMES, VECTOR = ArraySpec((4, 84, 84), "uint8"), ArraySpec((3,), "float32")


def test_numbers_of_numpy_and_none_are_taken() -> None:
    assert OnPolicyGAEBuffer.create_factory(size=np.int64(5), batch_size=None).size == 5
    assert PPO.create_factory(lr=1, target_kl=None).config.optimiser.learning_rate == 1
    assert ReplayBuffer.create_factory(replay_ratio=np.float32(2), size=None).replay_ratio == 2


def test_settings_are_recorded_as_plain_values_and_others_are_refused() -> None:
    found = recorded(PPO.create_factory(lr=np.float32(0.5), num_epochs=np.int64(3)).config)
    assert type(found["num_epochs"]) is int and type(found["learning_rate"]) is float
    config = dataclasses.make_dataclass("Own", [("kind", "Any", None)], frozen=True, kw_only=True)
    own: Any = type("Mine", (Algorithm,), {"Config": config, "losses": None})
    with pytest.raises(ValueError, match=r"Mine\.create_factory: kind has a value that JSON"):
        own.create_factory(kind=Path("a"))


def make_cartpole(limit: int = 500) -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


# --- names


@pytest.mark.parametrize(
    ("create", "wrong", "meant"),
    [
        (PPO.create_factory, "clip_parm", "clip_param"),
        (IMPALA.create_factory, "discount", "discounting"),
        (OnPolicyGAEBuffer.create_factory, "gae_lamda", "gae_lambda"),
        (OnPolicyVTraceBuffer.create_factory, "replay_sise", "replay_size"),
        (SAC.create_factory, "target_rat", "target_rate"),
        (ReplayBuffer.create_factory, "n_steps", "n_step"),
        (HindsightExperienceReplayBuffer.create_factory, "hindsight", "hindsight_share"),
    ],
)
def test_a_misspelt_name_is_refused_at_once_with_a_similar_one(
    create: Any, wrong: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=rf"{wrong}.*did you mean {meant}.*\? (It takes|See)"):
        create(**{wrong: 1})


@pytest.mark.parametrize("algo", [DQN, IMPALA, LASER, PPO, SAC, TD3])
def test_help_lists_every_hyperparameter_with_its_type_and_default(algo: Any) -> None:
    parameters = inspect.signature(algo.create_factory).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    step = {
        name: usual_of(algo.Config).get(name, value)
        for name, value in recorded(StepConfig()).items()
    }
    own = recorded(algo.Config()) | step
    others = {other: own[name] for other, name in OTHER_NAMES.items() if name in own}
    assert found == own | others
    assert parameters["lr"].annotation == "float"
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert f"lr: 'float' = {algo.Config().optimiser.learning_rate}" in pydoc.plain(
        pydoc.render_doc(algo.create_factory)
    )


def test_help_lists_every_setting_of_a_storage_with_its_type_and_default() -> None:
    shown = str(inspect.signature(HindsightExperienceReplayBuffer.create_factory))
    assert "size: 'int | None' = None" in shown and "hindsight_share: 'float' = 0.8" in shown
    made = OnPolicyVTraceBuffer.create_factory()
    parameters = inspect.signature(type(made).create_factory).parameters
    assert {name: found.default for name, found in parameters.items()} == vars(made)


def test_completion_knows_the_factory_of_environments() -> None:
    assert "create_factory" in dir(VecEnv)


def test_values_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="clip_param must be greater than 0"):
        PPO.create_factory(clip_param=0)
    with pytest.raises(ValueError, match="vec_env_size must be at least 1"):
        VecEnv.create_factory(env_fn=make_cartpole, vec_env_size=0)


def test_a_setting_of_your_own_may_have_another_name_of_one_that_you_lack() -> None:
    config = dataclasses.make_dataclass("Own", [("tau", "float", 0.5)], frozen=True, kw_only=True)
    own = type("Mine", (Algorithm,), {"Config": config, "losses": None})
    assert own.create_factory(tau=0.25).config.tau == 0.25  # type: ignore[attr-defined]


def test_a_name_and_its_other_name_are_not_given_both() -> None:
    with pytest.raises(TypeError, match="lr and learning_rate are the same|learning_rate and lr"):
        PPO.create_factory(lr=1e-3, learning_rate=1e-3)


def test_reprs_are_a_short_line_with_what_was_given() -> None:
    envs, action_space, obs_space = VecEnv.create_factory(env_fn=make_cartpole, vec_env_size=8)
    actor = OnPolicyActorCritic.create_factory(obs_space, action_space, "mlp", recurrent=True)
    for found, shown in [
        (envs, "VecEnv.create_factory(env_fn=make_cartpole, env_kwargs={}, vec_env_size=8)"),
        (actor, "OnPolicyActorCritic.create_factory(..., 'mlp', recurrent=True)"),
        (PPO.create_factory(lr=0.5, eps=1), "PPO.create_factory(learning_rate=0.5, epsilon=1)"),
        (OnPolicyBuffer.create_factory(size=5), "OnPolicyBuffer(size=5, batch_size=None)"),
        (envs(), "<SyncVecEnv: 8 of make_cartpole>"),
        (ArraySpec((4,), "float32"), "ArraySpec(shape=(4,), dtype='float32')"),
        (EnvSpec("Catch"), "EnvSpec(name='Catch')"),
        (make_env("Catch", 2), "<Catch: 2 of Catch>"),
        (
            Episodes([1.0, 3.0], [10, 20], [0, 0]),
            "<2 episodes: mean return 2.00 ± 1.41, mean length 15>",
        ),
    ]:
        assert repr(found) == shown


# --- algorithms


def test_other_names_set_the_fields_that_they_are_names_of() -> None:
    made = PPO.create_factory(
        lr=1e-4,
        eps=1e-7,
        gamma=0.5,
        entropy_coef=0.25,
        value_loss_coef=0.75,
        max_grad_norm=0.125,
        num_epochs=3,
        optimiser="rmsprop",
    )
    config = made.config
    assert isinstance(config, PPOConfig) and made.algo is PPO
    assert (config.optimiser.learning_rate, config.optimiser.epsilon) == (1e-4, 1e-7)
    assert config.optimiser.optimiser == "rmsprop"
    assert (config.discounting, config.entropy_cost, config.baseline_cost) == (0.5, 0.25, 0.75)
    assert made.step.grad_norm_clipping == 0.125 and config.num_epochs == 3


def test_hyperparameters_may_have_their_american_spelling() -> None:
    factory = PPO.create_factory(optimizer="adamw", normalize_advantages=False)
    assert factory == PPO.create_factory(optimiser="adamw", normalise_advantages=False)


def test_what_is_not_given_is_the_default_of_the_config() -> None:
    assert PPO.create_factory().config == PPOConfig()
    assert PPO.create_factory(lr=1e-4).config.optimiser.beta1 == PPOConfig().optimiser.beta1


def test_a_factory_makes_the_algorithm_of_the_programs() -> None:
    actor = OnPolicyActorCritic.create_factory(VECTOR, Discrete(2))("cpu")
    for algo in (PPO, IMPALA, LASER):
        made = algo.create_factory()("cpu", actor)
        assert isinstance(made, Algorithm) and type(made) is algo and made.actor is actor


def test_settings_are_recorded_by_the_names_of_flags() -> None:
    found = recorded(PPO.create_factory(lr=1e-4).config)
    assert found["learning_rate"] == 1e-4 and found["clip_param"] == 0.2
    assert not set(found) & set(OTHER_NAMES)


def test_other_names_of_off_policy_algorithms() -> None:
    made = SAC.create_factory(lr=1e-4, gamma=0.5, tau=0.25, initial_alpha=0.125)
    config = made.config
    assert (config.optimiser.learning_rate, config.discounting) == (1e-4, 0.5)
    assert (config.target_rate, config.temperature) == (0.25, 0.125)
    assert DDQN is DQN and DDQN.create_factory().config.double_dqn
    assert TD3.create_factory(tau=0.5).config.target_rate == 0.5


# --- actors


def test_feature_extractors_are_networks_by_name() -> None:
    found = [get_feature_extractor(name) for name in ("MLP", "CNN", "fixup", "ResNet")]
    assert found == [MLPNet, AtariNet, FixupNet, DeepNet]
    with pytest.raises(ValueError, match="no feature extractor 'M': use MLP, CNN, Fixup, ResNet"):
        get_feature_extractor("M")


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_factory_makes_the_network_that_it_names(recurrent: bool) -> None:
    made = OnPolicyActorCritic.create_factory(
        VECTOR, Discrete(2), get_feature_extractor("MLP"), {"hidden": 7}, recurrent
    )
    actor = made("cpu")
    assert isinstance(actor, MLPNet) and actor.fc.out_features == 7
    assert (actor.core is not None) == recurrent


def test_an_off_policy_actor_is_the_network_that_the_algorithm_trains() -> None:
    made = OffPolicyActorCritic.create_factory(
        VECTOR, Discrete(2), get_feature_extractor("MLP"), {"hidden": 7}
    )
    assert isinstance(made("cpu"), SACNet), "a policy, until the algorithm is known"
    net = made.trained_by(DQN)("cpu")
    assert isinstance(net, QNet) and net.features.num_features == 7


@pytest.mark.parametrize("name", ["MLP", "CNN", "Fixup", "ResNet"])
@pytest.mark.parametrize("algo", [DQN, SAC, TD3])
def test_every_feature_extractor_has_off_policy_networks(algo: Any, name: str) -> None:
    space = Box(-1.0, 1.0, (2,)) if algo is TD3 else Discrete(3)
    made = OffPolicyActorCritic.create_factory(FRAMES, space, get_feature_extractor(name))
    actor = made.trained_by(algo)("cpu")
    assert isinstance(actor, algo.actor_type)
    has_fixup = any(isinstance(module, FixupTorso) for module in actor.modules())
    assert has_fixup == (name == "Fixup")


def test_an_actor_begins_with_the_weights_of_a_file(tmp_path: Any) -> None:
    trained = OnPolicyActorCritic.create_factory(VECTOR, Discrete(2))("cpu")
    path = tmp_path / "weights.pt"
    of_2019 = {"stats": {"episode_returns": (np.float32(1.5),)}}
    weights = {"model_state_dict": trained.state_dict()}
    for saved in (trained.state_dict(), weights, {**weights, **of_2019}):
        torch.save(saved, path)
        again = OnPolicyActorCritic.create_factory(VECTOR, Discrete(2), restart_model=path)("cpu")
        for name, tensor in again.state_dict().items():
            assert tensor.equal(trained.state_dict()[name])


@pytest.mark.parametrize("algo", [IMPALA, PPO])
def test_fixup_blocks_begin_as_the_identity_and_all_their_parameters_learn(algo: Any) -> None:
    net = OnPolicyActorCritic.create_factory(FRAMES, Discrete(6), get_feature_extractor("Fixup"))
    actor = net.trained_by(algo)("cpu")
    x = torch.randn(2, 16, 21, 21)
    assert isinstance(actor, FixupNet)
    first = actor.blocks[0]
    torch.testing.assert_close(first(x), x)
    for parameter in first.parameters():  # zeros hide all but the last convolution's gradient
        nn.init.normal_(parameter)
    first(x).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in first.parameters())


# --- environments


def test_a_factory_gives_both_spaces_and_makes_the_environments_asked_for() -> None:
    factory, action_space, observation_space = VecEnv.create_factory(
        env_fn=make_cartpole, env_kwargs={"limit": 3}, vec_env_size=4
    )
    env = factory()
    assert isinstance(env, SyncVecEnv) and env.num_envs == 4
    assert (env.action_space, env.observation_space) == (action_space, observation_space)
    env.reset(1)
    cut = [env.step(np.array([0, 1, 0, 1])).truncated.all() for _ in range(3)]
    assert cut == [False, False, True], "the keyword arguments arrive"


def test_spaces_are_as_the_policy_sees_them() -> None:
    pytest.importorskip("ale_py")
    from torchbeast.envs import make_atari_train_env

    _, _, seen = VecEnv.create_factory(
        env_fn=make_atari_train_env, env_kwargs={"env_id": "ALE/Pong-v5"}
    )
    assert seen.shape == (4, 84, 84), "four frames of shape (1, 84, 84)"


# --- storages


def test_a_gae_storage_sets_the_algorithms_lambda() -> None:
    storage = OnPolicyGAEBuffer.create_factory(size=10, gae_lambda=0.5)
    assert storage.prepared(PPO.create_factory()).config.gae_lambda == 0.5
    with pytest.raises(ValueError, match="0.9 in PPO and 0.5 in OnPolicyGAEBuffer"):
        storage.prepared(PPO.create_factory(gae_lambda=0.9))


@pytest.mark.parametrize("algo", [DQN, SAC, TD3])
def test_a_replay_has_the_settings_of_the_programs_unless_it_is_given_others(algo: Any) -> None:
    usual = usual_of(algo.Config)
    found = ReplayBuffer.create_factory(size=12, priority_exponent=0.5).flags(algo)
    assert found["replay_size"] == 12 and found["priority_exponent"] == 0.5
    for name in ("replay_ratio", "batch_size", "learn_start", "unroll_length"):
        assert found[name] == usual[name]


@pytest.mark.parametrize(
    ("storage", "algo", "sentence"),
    [
        (
            OnPolicyGAEBuffer.create_factory(),
            IMPALA.create_factory(),
            "OnPolicyGAEBuffer .* IMPALA has no gae_lambda: use OnPolicyVTraceBuffer",
        ),
        (
            OnPolicyVTraceBuffer.create_factory(),
            PPO.create_factory(),
            "OnPolicyVTraceBuffer .* PPO does not correct .*: use OnPolicyGAEBuffer",
        ),
        (
            OnPolicyVTraceBuffer.create_factory(replay_size=10_000),
            IMPALA.create_factory(),
            "OnPolicyVTraceBuffer has a replay, but IMPALA does not use one",
        ),
        (
            OnPolicyBuffer.create_factory(),
            R2D2.create_factory(),
            "OnPolicyBuffer does not .*, but R2D2 replays .* by priority: use RolloutReplayBuffer",
        ),
        *(
            (
                RolloutReplayBuffer.create_factory(),
                algo.create_factory(),
                f"RolloutReplayBuffer replays .* {algo.__name__} does not .*: use {better}",
            )
            for algo, better in ((LASER, "OnPolicyVTraceBuffer"), (PPO, "OnPolicyGAEBuffer"))
        ),
    ],
)
def test_a_storage_and_an_algorithm_that_do_not_fit_are_both_named(
    storage: OnPolicyBuffer, algo: Any, sentence: str
) -> None:
    with pytest.raises(IncompatibleParts, match=f"(?i){sentence}"):
        storage.prepared(algo)
