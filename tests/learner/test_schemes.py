# SPDX-License-Identifier: Apache-2.0
"""A scheme says what it is, and refuses at once what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_schemes import CATCH, impala_of, off_policy_of, replay_of, scheme_of

from torchbeast import Learner, make_env
from torchbeast.core.actors import OnPolicyActorCritic
from torchbeast.core.algos import LASER, PPO
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import (
    HindsightExperienceReplayBuffer,
    OnPolicyGAEBuffer,
    OnPolicyVTraceBuffer,
)
from torchbeast.schemes import Scheme
from torchbeast.schemes.presets import PRESETS

ENVS, ACTION_SPACE, OBS_SPACE = VecEnv.create_factory(**CATCH)
FREE_WORKERS = {"col_remote_workers": 2, "col_communication": "asynchronous"}
PENDULUM = {"env_fn": make_env, "env_kwargs": {"env": "Pendulum-v1"}}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: scheme_of(col_communication="asynchronous"),
            "asynchronous.* needs workers, but col_remote_workers is 0",
        ),
        (lambda: scheme_of(col_backend="ray"), "ray.* needs workers"),
        (
            lambda: scheme_of(col_worker_resources={"num_cpus": 2}),
            "col_worker_resources .* Ray .*processes",
        ),
        (
            lambda: impala_of(
                grad_remote_workers=1,
                col_remote_workers=1,
                col_communication="asynchronous",
                col_backend="ray",
            ),
            'col_backend="ray" .*grad_backend is "processes"',
        ),
        (
            lambda: impala_of(inference="central"),
            "inference=.central.* needs workers, but col_remote_workers is 0",
        ),
        (
            lambda: impala_of(inference="central", col_remote_workers=2),
            "inference=.central.* never wait .* cannot collect synchronously: set col_",
        ),
        (
            lambda: impala_of(inference="central", col_backend="ray", **FREE_WORKERS),
            "inference=.central.* this machine.* col_backend=.ray. can place them on any node",
        ),
        (lambda: scheme_of(grad_backend="ray"), "grad_backend.*ray.* grad_remote_workers is 0"),
        (
            lambda: scheme_of(grad_remote_workers=2, grad_worker_resources={"num_cpus": 2}),
            "grad_worker_resources .* Ray .*processes",
        ),
        (
            lambda: scheme_of(
                algo=LASER.create_factory(),
                storage=OnPolicyVTraceBuffer.create_factory(size=10, replay_size=400),
                grad_remote_workers=1,
            ),
            "storage_factory has a replay, .*grad_remote_workers",
        ),
        (
            lambda: scheme_of(update_execution="decentralised"),
            '^update_execution="decentralised" needs workers, .*grad_remote_workers is 0',
        ),
        (
            lambda: scheme_of(grad_communication="asynchronous"),
            '^grad_communication="asynchronous" needs workers, .*grad_remote_workers is 0',
        ),
        (
            lambda: scheme_of(storage=OnPolicyVTraceBuffer.create_factory(size=10)),
            "OnPolicyVTraceBuffer .* PPO does not correct",
        ),
        (
            lambda: scheme_of(
                algo=PPO.create_factory(popart=True),
                grad_remote_workers=2,
                grad_communication="asynchronous",
            ),
            'popart .* grad_communication="asynchronous"',
        ),
        (
            lambda: scheme_of(
                PENDULUM,
                algo=LASER.create_factory(),
                storage=OnPolicyVTraceBuffer.create_factory(size=10),
            ),
            "MLPNet with LASER: LASER needs the probabilities of all actions",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_both_named(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_an_actor_for_other_spaces_is_refused() -> None:
    _, action_space, obs_space = VecEnv.create_factory(**PENDULUM)
    scheme = scheme_of()
    other = OnPolicyActorCritic.create_factory(obs_space, action_space)
    with pytest.raises(ValueError, match="observation_space .* train_envs_factory has"):
        Scheme(**{**vars(scheme), "actor_factory": other})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: scheme_of(local_device="gpu"), "local_device must be auto, cpu, cuda, or"),
        (
            lambda: Scheme.preset("ppo", VecEnv.create_factory(**CATCH)),
            r"train_envs_factory must be make_vec\(...\), or the first result of VecEnv",
        ),
        (
            lambda: off_policy_of(storage=replay_of(size=1000, learn_start=5000)),
            "holds 1000 steps: use at most 1000$",
        ),
        (
            lambda: scheme_of(storage=OnPolicyGAEBuffer.create_factory(size=0)),
            "unroll_length must be at least 1, got 0",
        ),
        (
            lambda: scheme_of(storage=OnPolicyGAEBuffer.create_factory(gae_lambda=2)),
            "gae_lambda must be between 0 and 1, got 2",
        ),
        (
            lambda: off_policy_of(storage=replay_of(priority_exponent=2)),
            "priority_exponent must be between 0 and 1, got 2",
        ),
        (
            lambda: off_policy_of(
                storage=HindsightExperienceReplayBuffer.create_factory(size=1000, n_step=3)
            ),
            "hindsight_share relabels single steps, but n_step is 3",
        ),
        (
            lambda: scheme_of(
                algo=LASER.create_factory(),
                storage=OnPolicyVTraceBuffer.create_factory(size=10, replay_ratio=7),
            ),
            "replay_size is 0, but replay_ratio needs a replay",
        ),
    ],
)
def test_a_value_that_cannot_be_met_is_refused_with_what_can(
    monkeypatch: pytest.MonkeyPatch, make: Any, sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ValueError, TypeError), match=sentence):
        make()


def test_resources_that_ray_cannot_reserve_are_refused() -> None:
    on_ray = {"grad_backend": "ray", "grad_remote_workers": 1}
    with pytest.raises(TypeError, match="num_gpu.* did you mean num_gpus"):
        scheme_of(**on_ray, grad_worker_resources={"num_gpu": 1})
    with pytest.raises(ValueError, match="num_cpus must be greater than 0"):
        scheme_of(**on_ray, grad_worker_resources={"num_cpus": 0})


def test_a_gradient_worker_uses_the_cores_that_are_reserved_for_it() -> None:
    on_ray = {"grad_backend": "ray", "grad_remote_workers": 1}
    reserved = {"num_cpus": 2, "num_gpus": 0.5}
    gradients = scheme_of(**on_ray, grad_worker_resources=reserved).gradients
    assert gradients is not None and (gradients.cores, gradients.gpus) == (2, 0.5)
    assert "1 Ray actor" in scheme_of(**on_ray).describe()


def test_a_factory_of_another_kind_is_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"algo_factory must be PPO\.create_factory"):
        Scheme(**{**vars(scheme_of()), "algo_factory": PPO})
    with pytest.raises(TypeError, match="the first result of VecEnv"):
        Scheme(**{**vars(scheme_of()), "train_envs_factory": VecEnv.create_factory(**CATCH)})


def test_an_unknown_argument_is_refused_with_the_closest_name() -> None:
    with pytest.raises(TypeError, match=r"^Scheme takes no 'col_worker'; did you mean col_"):
        Scheme(**{**vars(scheme_of()), "col_worker": 2})
    with pytest.raises(TypeError, match=r"^Learner takes no 'target_step'; did you mean target_s"):
        Learner(scheme_of(), target_step=100)  # type: ignore[call-arg]


def test_a_check_leaves_torchs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    scheme_of()
    assert torch.equal(before, torch.get_rng_state())


def test_a_batch_has_one_rollout_of_every_environment_unless_the_storage_says_otherwise() -> None:
    assert scheme_of().rollouts.batch_size == 2
    assert scheme_of(col_remote_workers=3).rollouts.batch_size == 6
    axes = {"col_remote_workers": 3, "col_communication": "asynchronous"}
    assert scheme_of(**axes).rollouts.batch_size == 2, "one worker's are ready first"
    five = OnPolicyGAEBuffer.create_factory(size=10, batch_size=5)
    assert scheme_of(storage=five, **axes).rollouts.batch_size == 5
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        scheme_of(storage=OnPolicyGAEBuffer.create_factory(size=10, batch_size=0))
    with pytest.raises(ValueError, match="batch_size 5 must be a multiple of vec_env_size"):
        scheme_of(storage=five, col_remote_workers=3)


# --- descriptions


def test_a_description_names_every_part() -> None:
    said = impala_of(col_remote_workers=3, col_communication="asynchronous").describe()
    for part in ("3 processes with 2 environments each", "asynchronous", "IMPALA", "mlp"):
        assert part in said
    assert "without waiting" in said and "OnPolicyVTraceBuffer" in said
    central = impala_of(inference="central", **FREE_WORKERS).describe()
    assert "actions: in the learner's process" in central
    assert "1 process with 2" in scheme_of(col_remote_workers=1).describe()
    assert "in the learner's process" in scheme_of().describe()


def test_a_notebook_shows_the_description() -> None:
    scheme = impala_of(col_remote_workers=3, col_communication="asynchronous")
    assert repr(scheme) == scheme.describe()


# --- named architectures


QUICK = ("ppo", "impala", "dppo", "dqn")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in PRESETS],
)
def test_a_named_architecture_learns(name: str, tmp_path: Path) -> None:
    scheme = Scheme.preset(name, ENVS)
    if scheme.inference == "central":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        before = {key: value.clone() for key, value in learner.actor.state_dict().items()}
        learner.step()
        after = learner.actor.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before)


def test_parts_of_a_named_architecture_can_be_replaced() -> None:
    scheme = Scheme.preset("ppo", ENVS, col_remote_workers=2, algo_factory=PPO.create_factory(lr=1))
    assert scheme.col_remote_workers == 2
    assert scheme.algo.config.optimiser.learning_rate == 1


def test_an_update_may_be_spelt_as_in_american_english() -> None:
    scheme = scheme_of(grad_remote_workers=2, update_execution="decentralized")
    assert scheme.update_execution == "decentralised" and scheme.gradients is not None
    assert scheme.gradients.update_execution == "decentralised"


def test_the_name_of_an_architecture_may_be_typed_in_any_case() -> None:
    assert Scheme.preset("DD-PPO", ENVS) == Scheme.preset("dd-ppo", ENVS)


def test_an_unknown_architecture_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'pop': use a2c, ppo, "):
        Scheme.preset("pop", ENVS)
    with pytest.raises(
        ValueError, match=r"unknown architecture VecEnv\.create_factory.*: use a2c, ppo, "
    ):
        Scheme.preset(ENVS, "ppo")  # type: ignore[arg-type]


def test_a_hyperparameter_of_a_preset_leaves_the_others_as_they_are() -> None:
    scheme = Scheme.preset("ppo", ENVS, lr=5e-4, gamma=0.98)
    assert scheme.algo_factory == PPO.create_factory(learning_rate=5e-4, discounting=0.98)
    a2c, plain = Scheme.preset("a2c", ENVS, gamma=0.98), Scheme.preset("a2c", ENVS)
    assert a2c.algo_factory == plain.algo_factory.replaced(discounting=0.98)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_a_hyperparameter_that_the_storage_of_a_preset_has_too_is_given_once(name: str) -> None:
    assert Scheme.preset(name, ENVS, gae_lambda=0.9).algo.config.gae_lambda == 0.9


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"learning_rat": 1e-3}, "did you mean learning_rate"),
        ({"col_remote_worker": 2}, "did you mean col_remote_workers"),
        ({"lr": 1e-3, "algo_factory": PPO.create_factory()}, "give lr to its create_factory"),
    ],
)
def test_other_names_beside_a_preset_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        Scheme.preset("ppo", ENVS, **given)


def test_a2c_is_ppo_whose_ratios_are_all_1(tmp_path: Path) -> None:
    with Learner(Scheme.preset("a2c", ENVS), 10**6, tmp_path / "run") as learner:
        metrics = learner.step()
    assert metrics["ratio"] == pytest.approx(1, abs=0.02), "bfloat16 rounds"
    assert metrics["clip_fraction"] == 0


def test_environments_of_evaluations_with_other_spaces_are_refused() -> None:
    other, *_ = VecEnv.create_factory(**PENDULUM)
    with pytest.raises(ValueError, match="test_envs_factory has the spaces"):
        Scheme(**{**vars(scheme_of()), "test_envs_factory": other})
