# SPDX-License-Identifier: Apache-2.0
"""The Python door with algorithms that learn from single steps of a replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from background import wait_for
from later import later
from small_schemes import CATCH, SMALL, off_policy_of, replay_of, scheme_of

import torchbeast
from torchbeast import Learner, monobeast
from torchbeast.collect.replayed import transitions_of
from torchbeast.core.actors import OffPolicyActorCritic
from torchbeast.core.algos import DQN, LASER, PPO, SAC, TD3
from torchbeast.core.algos.config import DQNConfig
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import HindsightExperienceReplayBuffer, OnPolicyBuffer, ReplayBuffer
from torchbeast.core.storages.replay.transition_replay import Sample
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import IncompatibleParts
from torchbeast.reporting.log_files import read_logs
from torchbeast.schemes import Scheme

PENDULUM = {"env_fn": torchbeast.make_env, "env_kwargs": {"env": "Pendulum-v1"}, "vec_env_size": 2}
RATIO = 4  # updates of 16 steps: one for 4 new steps


def small(**settings: Any) -> Any:
    return replay_of(**{"replay_ratio": RATIO, **settings})


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.actor.state_dict().items()}


def all_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


# --- the loop


@pytest.mark.parametrize(("algo", "envs"), [later(DQN, CATCH), (SAC, CATCH), (TD3, PENDULUM)])
def test_it_learns_until_its_target_and_is_evaluated(algo: Any, envs: Any, tmp_path: Path) -> None:
    scheme = off_policy_of(envs, algo.create_factory(lr=1e-3, gamma=0.9), small())
    learner = Learner(scheme, 200, tmp_path / "run", seed=1)
    before, seen = weights_of(learner), []
    while not learner.done():
        found = learner.step()
        seen.append(found["step"])
    assert learner.steps == 200
    assert learner.updates == (200 - 40) * RATIO // 16 - 1, "the second one of the last 8 steps"
    assert seen == sorted(seen) and seen[0] > 40
    assert found["learnt_steps"] == 16 * learner.updates and found["samples_per_insert"] > 3
    after = weights_of(learner)
    assert all(
        not torch.equal(before[name], after[name]) for name, _ in learner.actor.named_parameters()
    )
    assert len(learner.evaluate(2).returns) == 2
    saved = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")
    assert saved["flags"]["algo"] == algo.__name__.lower() and saved["stats"]["step"] == 200


def test_the_settings_are_those_that_the_programs_have() -> None:
    envs, _, _ = VecEnv.create_factory(**CATCH)
    scheme = Scheme.preset("sac", envs)
    assert (scheme.rollouts.batch_size, scheme.rollouts.unroll_length) == (256, 4)
    assert (scheme.replay.replay_size, scheme.replay.learn_start) == (1_000_000, 5_000)
    assert Scheme.preset("dqn", envs).replay.replay_ratio == 8

    class Mine(SAC):
        """SAC with something new."""

    mine = replace(scheme, algo_factory=Mine.create_factory())
    assert mine.replay == scheme.replay, "a subclass has those of its base"


def test_the_programs_evaluate_and_resume_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Learner(off_policy_of(storage=small(n_step=3)), 200, tmp_path / "run") as learner:
        learner.train()
    named = ["--savedir", str(tmp_path), "--xpid", "run"]
    assert monobeast.main([*named, "--mode", "test", "--num_episodes", "2"]) == 0
    assert monobeast.main([*named, "--total_steps", "300"]) == 0
    assert "n_step" not in capsys.readouterr().out, "no setting has changed"
    assert [row["step"] for row in read_logs(tmp_path / "run")][-1] >= 300


# --- saved and restored


def drawn(learner: Learner) -> Sample:
    """The next sample of the learner's replay."""
    return learner._training.source._replay.sample(16)  # type: ignore[attr-defined]


def updated(learner: Learner, sample: Sample) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)  # of SAC's actions
    learner._run.made.optimiser_step.update(replace(transitions_of(sample), weights=torch.ones(16)))
    return weights_of(learner)


@pytest.mark.parametrize("algo", [later(DQN), SAC])
def test_a_restored_learner_takes_the_identical_next_step(algo: Any, tmp_path: Path) -> None:
    """The same sample, with the same priorities, and the same weights after it."""
    storage = small(checkpoint_replay=True, priority_exponent=0.6, n_step=2)
    scheme = off_policy_of(algo=algo.create_factory(), storage=storage)
    with Learner(scheme, 400, tmp_path / "run", seed=1) as learner:
        learner.train(150)
        learner.save_model()
        sample = drawn(learner)
        expected, steps = updated(learner, sample), learner.steps
        learner.step()
        learner.restore()
        again = drawn(learner)
        for name, one, two in zip(Sample._fields, sample, again, strict=True):
            np.testing.assert_equal(one, two, err_msg=name)
        assert len(np.unique(sample.probabilities)) > 5, "priorities differ"
        assert all_equal(expected, updated(learner, again)) and learner.steps == steps
        assert learner.train()["step"] >= 400


def test_without_its_replay_a_restored_learner_collects_one_first(tmp_path: Path) -> None:
    with Learner(off_policy_of(storage=small()), 400, tmp_path / "run") as learner:
        learner.train(100)
        learner.save_model()
        learner.restore()
        steps = learner.steps
        assert learner.step()["step"] > steps + 40


# --- goals, and the borders of rollouts

LENGTH = 7


class Clock(gymnasium.Env):
    """Achieves (number of the episode, steps in it), which no other episode does; it is cut."""

    observation_space = gymnasium.spaces.Dict(
        dict.fromkeys(
            ("achieved_goal", "desired_goal", "observation"),
            gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        )
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode, self._time = int(self.np_random.integers(2**20)), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._time += 1
        return self._seen(), -1.0, False, self._time == LENGTH, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return (achieved == desired).all(-1) - 1.0

    def _seen(self) -> Any:
        here = np.array([self._episode, self._time], np.float32)
        wanted = np.full(2, -1, np.float32)
        return {"achieved_goal": here, "desired_goal": wanted, "observation": here}


def batches_of(scheme: Scheme, folder: Path, count: int) -> list[Transitions]:
    """What updates learn from, of a run of the scheme."""
    found = []
    with Learner(scheme, 10**6, folder, seed=1) as learner:
        for _ in range(count):
            batch = learner._started().next_batch()
            assert isinstance(batch, Transitions)
            found.append(batch.map(torch.clone))
    return found


@pytest.mark.parametrize("axes", [{}, {"col_remote_workers": 1}], ids=["here", "a worker"])
def test_other_goals_are_what_the_same_episode_achieved_later(axes: Any, tmp_path: Path) -> None:
    storage = HindsightExperienceReplayBuffer.create_factory(
        size=2000, batch_size=16, learn_start=100, replay_ratio=16, hindsight_share=0.75
    )
    scheme = off_policy_of({"env_fn": Clock, "vec_env_size": 2}, storage=storage, **axes)
    changed = count = 0
    for batch in batches_of(scheme, tmp_path / "run", 40):
        seen, after = batch.observation, batch.next_observation
        for goal, before, now, reward in zip(
            seen["desired_goal"], seen["achieved_goal"], after["achieved_goal"], batch.reward,
            strict=True,
        ):  # fmt: skip
            count += 1
            if goal[0] >= 0:
                changed += 1
                assert goal[0] == before[0] == now[0], "of this episode"
                assert now[1] <= goal[1] <= LENGTH, "later in it"
                assert reward == (0.0 if torch.equal(goal, now) else -1.0)
        assert torch.equal(seen["desired_goal"], after["desired_goal"])
    assert 0.55 < changed / count < 0.8, "running episodes keep their goal"


def test_a_step_over_the_border_of_rollouts_is_one_step(tmp_path: Path) -> None:
    scheme = off_policy_of(
        {"env_fn": Clock, "vec_env_size": 2}, storage=small(unroll_length=3, n_step=1)
    )
    ends: set[int] = set()
    for batch in batches_of(scheme, tmp_path / "run", 40):
        before, after = batch.observation["observation"], batch.next_observation["observation"]
        assert torch.equal(after[:, 0], before[:, 0]), "its own last observation too"
        assert torch.equal(after[:, 1], before[:, 1] + 1)
        ends |= {int(end) for end in after[:, 1]}
    assert ends == set(range(1, LENGTH + 1)), "borders lie everywhere in episodes of 7 steps"


# --- the axes; all of them are combined in test_combinations.py


@pytest.mark.parametrize("workers", [0, later(2)])
def test_a_synchronous_run_is_the_same_every_time(workers: int, tmp_path: Path) -> None:
    scheme = off_policy_of(storage=small(priority_exponent=0.6), col_remote_workers=workers)
    found = []
    for name in ("first", "again"):
        with Learner(scheme, 10**6, tmp_path / name, seed=3) as learner:
            learner.train(90)
            found.append(weights_of(learner))
    assert all_equal(*found)


def test_a_free_learner_and_its_workers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    axes = {"col_remote_workers": 2, "col_communication": "asynchronous"}
    scheme = off_policy_of(storage=small(replay_ratio=float("inf")), **axes)
    with Learner(scheme, 10**6, tmp_path / "run") as learner:
        first = learner.step()["step"]
        assert [learner.step()["updates"] for _ in range(30)] == list(range(2, 32))
        wait_for(lambda: learner.step()["step"] > first)  # collecting continues


# --- what does not go together


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: scheme_of(algo=SAC.create_factory()),
            "OnPolicyGAEBuffer yields Rollout, but SAC trains on Transitions: use ReplayBuffer",
        ),
        (
            lambda: scheme_of(
                algo=DQN.create_factory(), storage=OnPolicyBuffer.create_factory(size=5)
            ),
            "OnPolicyBuffer yields Rollout, but DQN",
        ),
        (
            lambda: off_policy_of(algo=PPO.create_factory()),
            "ReplayBuffer yields Transitions, but PPO trains on Rollout: use OnPolicyGAEBuffer",
        ),
        (
            lambda: off_policy_of(algo=LASER.create_factory()),
            "ReplayBuffer yields .* LASER .*: use OnPolicyVTraceBuffer",
        ),
        (
            lambda: off_policy_of(algo=TD3.create_factory()),
            "OffPolicyActorCritic with TD3: TD3Net needs a Box action space, got Discrete",
        ),
        (
            lambda: off_policy_of(PENDULUM),
            "QNet with DQN: QNet needs a Discrete action space|OffPolicyActorCritic with DQN: .*",
        ),
        (
            lambda: off_policy_of(storage=HindsightExperienceReplayBuffer.create_factory()),
            "HindsightExperienceReplayBuffer in this scheme: hindsight needs .* desired_goal",
        ),
        (
            lambda: off_policy_of(storage=small(replay_ratio=float("inf"))),
            'ReplayBuffer in this scheme: with replay_ratio .* col_communication="synchronous"',
        ),
        (
            lambda: off_policy_of(grad_remote_workers=2),
            "storage_factory has a replay, .* out of reach of gradient workers: remove",
        ),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_both_named(make: Any, sentence: str) -> None:
    with pytest.raises(IncompatibleParts, match=sentence):
        make()


def test_a_network_of_the_other_family_is_refused() -> None:
    """A policy that SAC could train is none for DQN."""
    _, action_space, obs_space = VecEnv.create_factory(**CATCH)
    wrong = OffPolicyActorCritic.create_factory(obs_space, action_space, "sac-mlp", SMALL)
    with pytest.raises(IncompatibleParts, match="SACNet with DQN: DQN needs .* QNetwork"):
        replace(off_policy_of(), actor_factory=wrong)


def test_an_algorithm_that_sets_some_defaults_has_the_programs_others() -> None:
    @dataclass(frozen=True, kw_only=True)
    class FewConfig(DQNConfig):
        usual: ClassVar = {"replay_size": 5_000}

    class Few(DQN):
        Config = FewConfig

    scheme = off_policy_of(algo=Few.create_factory(), storage=ReplayBuffer.create_factory())
    assert (scheme.rollouts.batch_size, scheme.replay.replay_size) == (8, 5_000)
