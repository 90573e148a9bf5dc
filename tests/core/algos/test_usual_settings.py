# SPDX-License-Identifier: Apache-2.0
"""The defaults of shared flags and of networks that an algorithm sets, whoever asks for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from torchbeast import make_env
from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.actors.networks import BuiltInNet, MLPNet, SmallNet
from torchbeast.core.actors.registry import in_family, make_model
from torchbeast.core.algos import IMPALA, PPO
from torchbeast.core.algos.config import PPOConfig, recorded
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.errors import UsageError
from torchbeast.run.checkpoint import FoundCheckpoint
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.schemes import Scheme

VECTOR, BOX = ArraySpec((5,), "float32"), Box((-1.0, -2.0), (1.0, 2.0), (2,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyConfig(PPOConfig):
    usual: ClassVar[Mapping[str, Any]] = {
        **PPOConfig.usual,
        "num_envs": 6,
        "max_lag": 3,
        "precision": "float32",
    }


class MyPPO(PPO):
    Config = MyConfig


def parsed(*words: str) -> Any:
    return parse(MonoBeastFlags, "monobeast", ["--xpid", "x", *words])


def test_a_run_of_before_goes_on_without_normalised_returns() -> None:
    """Its checkpoint lacks their statistics."""
    config = parsed("--algo", "ppo").learner_config("CartPole-v1")
    assert config.after({"algo": "ppo"}).algorithm.normalise_returns is False


def test_the_flag_and_the_architecture_ppo_have_equal_settings() -> None:
    flags = parsed("--algo", "ppo", "--env", "CartPole-v1")
    envs, _, _ = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": "CartPole-v1"}, vec_env_size=PPOConfig.usual["num_envs"]
    )
    scheme = Scheme.preset("ppo", envs)
    assert recorded(scheme.algo.config) == recorded(flags.algorithm)
    assert recorded(scheme.algo.step) == recorded(flags.step)
    assert recorded(scheme.rollouts) == recorded(flags.rollouts)
    assert scheme.is_synchronous and flags.processes.fixed_lag == 0
    assert flags.processes.environments() == scheme.num_envs


def test_a_users_algorithm_sets_defaults_of_other_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    found = flatten(parsed("--algo", "test_usual_settings:MyPPO"))
    assert (found["num_envs"], found["batch_size"], found["max_lag"]) == (6, 6, 3)
    assert found["precision"] == "float32"
    assert MyPPO.create_factory().step.max_lag == 3


@pytest.mark.parametrize(
    ("words", "batch_size"),
    [((), 8), (("--num_envs", "32"), 32), (("--num_envs", "32", "--batch_size", "16"), 16)],
)
def test_the_batch_of_ppo_has_a_rollout_of_every_environment(
    words: tuple[str, ...], batch_size: int
) -> None:
    assert flatten(parsed("--algo", "ppo", *words))["batch_size"] == batch_size


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        ((), "CartPole-v1", True),
        ((), "PongNoFrameskip-v4", False),
        (("--reward_scale", "0.1"), "CartPole-v1", False),
        (("--reward_clipping", "abs_one"), "CartPole-v1", False),
        (("--reward_clipping", "none"), "PongNoFrameskip-v4", True),
        (("--no_normalise_returns",), "CartPole-v1", False),
        (("--normalise_returns",), "CartPole-v1", True),
        (("--reward_scale", "0.1", "--normalise_returns"), "CartPole-v1", True),
    ],
)
@pytest.mark.parametrize("algo", ["impala", "ppo"])
def test_returns_are_normalised_unless_rewards_are_clipped_or_scaled(
    algo: str, words: tuple[str, ...], env: str, expected: bool
) -> None:
    config = parsed("--algo", algo, *words).learner_config(env).after({})
    assert config.algorithm.normalise_returns is expected


def test_popart_is_not_added_to_a_run() -> None:
    config = parsed("--popart").learner_config("CartPole-v1")
    assert config.after({"popart": True}).algorithm.popart
    with pytest.raises(UsageError, match="popart cannot be added to a run"):
        config.after({"popart": False})


def made(algo: Any, **kwargs: Any) -> Any:
    spec = in_family(ActorSpec("mlp", kwargs), algo.family, algo.network)
    return make_model(spec, VECTOR, BOX)


def reached(model: Any, output: str) -> set[str]:
    """Returns the names of the parameters on which an output depends."""
    inputs = model.distribution.zero_action((1, 3))
    from torchbeast.core.actors.contract import ModelInputs

    rows = ModelInputs(torch.ones(1, 3, 5), torch.ones(1, 3), torch.zeros(1, 3) > 0, inputs)
    model.zero_grad()
    getattr(model(rows, ()), output).sum().backward()
    return {name for name, p in model.named_parameters() if p.grad is not None}


def test_policy_and_value_share_no_parameter_unless_asked() -> None:
    apart = made(PPO)
    assert not reached(apart, "policy_logits") & reached(apart, "baseline")
    assert reached(apart, "policy_logits") | reached(apart, "baseline") == {
        name for name, _ in apart.named_parameters()
    }
    shared = made(PPO, shared_body=True)
    assert reached(shared, "policy_logits") & reached(shared, "baseline")


def test_ppo_shares_a_body_that_sees_images_or_remembers() -> None:
    images = ArraySpec((4, 10, 10), "uint8")
    assert SmallNet(images, BOX, False, shared_body=None).value_body is None
    assert MLPNet(VECTOR, BOX, True, shared_body=None).value_body is None
    assert MLPNet(VECTOR, BOX, False, shared_body=None).value_body is not None


def test_two_recurrent_bodies_have_a_state_each() -> None:
    model = make_model(ActorSpec("mlp", {"shared_body": False}, use_lstm=True), VECTOR, Discrete(2))
    assert model.initial_state(3)[0][0].shape == model.initial_state(3)[1][0].shape == (1, 3, 128)


def norms(weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(weight)


def test_the_layers_of_ppo_are_orthogonal_with_the_gains_of_their_places() -> None:
    model = made(PPO)
    for layer, gain in [
        (model.linear, math.sqrt(2)),
        (model.fc, math.sqrt(2)),
        (model.value_body.fc, math.sqrt(2)),
        (model.policy, 0.01),
        (model.value_body.baseline, 1.0),
    ]:
        torch.testing.assert_close(norms(layer.weight), torch.full_like(norms(layer.weight), gain))
        assert not layer.bias.any()


def test_the_deviation_of_ppo_depends_on_no_observation_but_is_learnt() -> None:
    model = made(PPO)
    seen = torch.randn(4, model.policy.in_features)
    logits = model.policy(seen)
    assert bool((logits[:, 2:] == 0).all()) and logits[:, :2].std() > 0
    logits.sum().backward()
    assert bool(model.policy.bias.grad.all()) and not model.policy.weight.grad[2:].any()
    asked = made(PPO, state_deviation=True).policy(seen)
    assert asked[:, 2:].std() > 0


@pytest.mark.parametrize("algo", [PPO, IMPALA])
def test_an_untrained_policy_has_the_initial_deviation(algo: type[PPO] | type[IMPALA]) -> None:
    torch.manual_seed(1)
    model = made(algo, initial_deviation=0.25, hidden=512)
    seen = torch.zeros(1, model.policy.in_features)
    actions = torch.stack([model.distribution.sample(model.policy(seen))[0] for _ in range(2000)])
    half_box = (torch.tensor(BOX.high) - torch.tensor(BOX.low)) / 2
    torch.testing.assert_close(
        actions.std(0), (0.25 * half_box).expand(2).float(), rtol=0.05, atol=0
    )


def test_impala_draws_the_network_of_before() -> None:
    torch.manual_seed(1)
    before = MLPNet(VECTOR, BOX, False).state_dict()
    torch.manual_seed(1)
    after = made(IMPALA)
    assert isinstance(after, BuiltInNet) and before.keys() == after.state_dict().keys()
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("now", [{}, {"hidden": 64}])
def test_a_run_of_before_keeps_its_network(now: dict[str, Any]) -> None:
    net = MLPNet(VECTOR, BOX, False, **now)
    saved = {"format": 1, "model": "mlp", "flags": {"algo": "ppo", "model_kwargs": now}}
    earlier = EarlierRun(
        FoundCheckpoint({**saved, "model_state_dict": net.state_dict()}, Path("run/model.tar"))
    )
    spec = earlier.actor(ActorSpec("auto", now), PPO)
    assert (spec.name, spec.kwargs) == ("mlp", now)
    earlier.check_same_model(spec)
    make_model(spec, VECTOR, BOX).load_state_dict(net.state_dict())
