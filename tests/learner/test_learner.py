# SPDX-License-Identifier: Apache-2.0
"""The Python door: a run of a Learner is a run of a program, and takes nothing over."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
import warm
from later import later
from small_schemes import impala_of, scheme_of

import torchbeast
from torchbeast import Learner, Rollout, RunError, UsageError, VecEnv, make_env, monobeast
from torchbeast.core.actors import OnPolicyActorCritic
from torchbeast.core.algos import LASER, PPO
from torchbeast.core.storages import OnPolicyBuffer, OnPolicyVTraceBuffer
from torchbeast.fleets import child_process
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import callbacks
from torchbeast.run import checkpoint as checkpoints
from torchbeast.schemes import Scheme

TWO_PROCESSES = {"col_remote_workers": 2}
STEPS = 2 * 10  # of an update in one process


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.actor.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def next_batch(learner: Learner) -> Rollout:
    """Returns a copy of the batch that the next step would learn from."""
    batch = learner._started().next_batch()
    assert isinstance(batch, Rollout)
    return batch.map(torch.clone)


# --- the loop


def test_its_logs_can_be_thinned_and_do_without_tensorboard(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_interval": 3600.0, "disable_tensorboard": True}
    with Learner(scheme_of(), 5 * STEPS, tmp_path / "run", **options) as learner:
        learner.train()
    rows = read_logs(tmp_path / "run")
    assert [row["step"] for row in rows] == [STEPS, 5 * STEPS]
    assert not [*(tmp_path / "run").glob("events*")]


def test_it_learns_until_its_target_and_then_writes_the_checkpoint(tmp_path: Path) -> None:
    learner = Learner(scheme_of(), 3 * STEPS - 1, tmp_path / "run", seed=1)
    before = weights_of(learner)
    seen = []
    while not learner.done():
        assert not (tmp_path / "run" / "model.tar").exists()
        seen.append(learner.step()["step"])
    assert seen == [STEPS, 2 * STEPS, 3 * STEPS] and learner.updates == 3
    assert not all(
        torch.equal(before[name], tensor) for name, tensor in weights_of(learner).items()
    )
    saved = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")
    assert saved["stats"]["step"] == 3 * STEPS
    assert_same(saved["model_state_dict"], weights_of(learner))
    loaded = torchbeast.load_agent(tmp_path / "run").agent
    assert loaded.single_frame_space == learner.scheme.train_envs_factory.single_frame_space
    assert_same(loaded.model.state_dict(), weights_of(learner))
    assert [row["step"] for row in read_logs(tmp_path / "run")] == seen
    with pytest.raises(UsageError, match=r"the run has ended: it reached target_steps 59; "):
        learner.step()


@pytest.mark.parametrize("workers", [{}, TWO_PROCESSES])
def test_two_learners_with_a_seed_learn_the_same_and_a_third_with_another_does_not(
    tmp_path: Path, workers: dict[str, int]
) -> None:
    learnt = []
    for number, seed in enumerate((1, 1, 2)):
        with Learner(scheme_of(**workers), 200, tmp_path / str(number), seed=seed) as learner:
            learner.train()
            learnt.append(weights_of(learner))
    first, second, other = learnt
    assert_same(first, second)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_train_stops_where_it_is_told_and_goes_on(tmp_path: Path) -> None:
    with Learner(scheme_of(), 6 * STEPS, tmp_path / "run") as learner:
        assert learner.train(2 * STEPS)["step"] == 2 * STEPS
        assert learner.train()["step"] == 6 * STEPS
        with pytest.raises(ValueError, match="more than target_steps 120"):
            learner.train(7 * STEPS)


def test_info_and_metrics_say_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as learner:
        learner.train(4 * STEPS)
        learner.print_info()
        found = learner.get_metrics()
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"step {4 * STEPS} of {10 * STEPS} (40 %), ")
    assert f"mean return {found['mean_return']:.2f}" in said
    assert repr(learner).startswith(f"<Learner: step {4 * STEPS} of {10 * STEPS} (40 %), ")
    assert found["updates"] == 4 and found["episodes"] == 8, "an episode of Catch has 9 steps"
    assert found["max_lag"] == 0 and found["grad_norm"] > 0


def test_an_evaluation_plays_whole_episodes_and_leaves_training_as_it_was(tmp_path: Path) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run", seed=1) as learner:
        learner.train(2 * STEPS)
        before, random = weights_of(learner), torch.get_rng_state()
        played = learner.evaluate(5, seed=3)
        assert len(played.returns) == 5 and set(played.returns) <= {-1.0, 1.0}
        assert learner.evaluate(5, seed=3).returns == played.returns
        assert_same(before, weights_of(learner))
        assert torch.equal(random, torch.get_rng_state())


def test_an_evaluation_computes_as_workers_on_the_cpu_do_whatever_the_learner_computes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.dtype] = []
    monkeypatch.setattr(
        callbacks, "play", lambda env, agent, *_, **__: found.append(agent.model.compute_dtype)
    )
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as learner:
        learner.actor.compute_dtype = torch.bfloat16  # as on a GPU
        learner.evaluate(1)
    assert found == [torch.float32]


# --- saved, restored, resumed


def test_a_restored_learner_takes_the_identical_next_step(tmp_path: Path) -> None:
    first = Learner(scheme_of(), 10 * STEPS, tmp_path / "first", seed=1)
    first.train(3 * STEPS)
    saved = first.save_model(tmp_path / "kept.tar")
    batch = next_batch(first)
    torch.manual_seed(7)
    first._run.made.optimiser_step.update(batch)
    second = Learner(scheme_of(), 10 * STEPS, tmp_path / "second", seed=2)
    second.restore(saved)
    assert second.steps == 3 * STEPS and second.updates == 3
    torch.manual_seed(7)
    second._run.made.optimiser_step.update(batch)
    assert_same(weights_of(first), weights_of(second))
    second.step()
    assert second.steps == 5 * STEPS, "the step above counts too"
    first.close()
    second.close()


def test_paths_of_public_functions_may_be_texts_that_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    envs, action_space, obs_space = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": "Catch"}, log_dir="~/run"
    )
    assert envs.log_dir == tmp_path / "run"
    with Learner(scheme_of(), 10 * STEPS, "~/run", seed=1) as learner:
        learner.train(STEPS)
        assert learner.save_model("~/kept.tar") == tmp_path / "kept.tar"
        learner.train(2 * STEPS)
        learner.restore("~/kept.tar")
        assert learner.steps == STEPS
        kept = weights_of(learner)
    assert_same(kept, torchbeast.load_agent("~/run").agent.model.state_dict())
    assert torchbeast.load_checkpoint("~/kept.tar")["stats"]["step"] == STEPS
    with pytest.raises(UsageError, match="there is no checkpoint at .*missing.tar"):
        torchbeast.load_checkpoint("~/missing.tar")
    with pytest.raises(UsageError, match="it is a folder"):
        torchbeast.load_checkpoint("~/run")
    restarted = OnPolicyActorCritic.create_factory(
        obs_space, action_space, restart_model="~/kept.tar"
    )
    assert restarted.restart_model == tmp_path / "kept.tar"


def test_weights_that_were_saved_before_the_first_step_are_the_next_learners(
    tmp_path: Path,
) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run", seed=1) as learner:
        assert learner.save_model() == tmp_path / "run" / "model.tar"
        saved = weights_of(learner)
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run", seed=2) as learner:
        assert learner.steps == 0
        assert_same(weights_of(learner), saved)
        learner.train(STEPS)


def test_a_restored_learner_goes_on_with_the_random_numbers_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run", seed=1) as learner:
        learner.train(STEPS)
        learner.save_model()
        with learner._training.own:
            expected = torch.rand(3)
        learner.train(2 * STEPS)
        learner.restore()
        with learner._training.own:
            assert torch.equal(torch.rand(3), expected) and learner.steps == STEPS


def test_a_learner_with_the_same_folder_goes_on_where_the_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run", seed=5) as learner:
        learner.train(2 * STEPS)
        before = weights_of(learner)
    again = Learner(scheme_of(), 4 * STEPS, tmp_path / "run")
    assert "total_steps 80 (previously 200)" in capsys.readouterr().out.splitlines()
    assert_same(before, weights_of(again))
    again.train()
    steps = [row["step"] for row in read_logs(tmp_path / "run")]
    assert steps == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert meta["args"]["seed"] == 5 and meta["successful"] is True
    assert meta["changed"] == {"total_steps": [200, 80]} and meta["step"] == 2 * STEPS
    before_it = {each: each.read_bytes() for each in (tmp_path / "run").glob("*[rnv]")}
    assert {"model.tar", "meta.json", "logs.csv"} <= {each.name for each in before_it}
    complete = Learner(scheme_of(), 3 * STEPS, tmp_path / "run")
    assert complete.done() and len(complete.evaluate(1).returns) == 1
    Learner(scheme_of(), 10 * STEPS, tmp_path / "run").close()
    assert {each: each.read_bytes() for each in (tmp_path / "run").glob("*[rnv]")} == before_it


def test_a_checkpoint_is_written_in_time_and_what_follows_it_is_learnt_again(
    tmp_path: Path,
) -> None:
    learner = Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    learner.step()
    assert not (tmp_path / "run" / "model.tar").exists()
    (periodic,) = learner._training.consumers
    periodic._due = 0.0  # type: ignore[attr-defined]
    learner.step()
    learner.step()
    del learner  # as a process that is killed, it writes nothing
    gc.collect()
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as again:
        assert again.steps == 2 * STEPS


def test_a_log_without_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    learner = Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    learner.step()
    del learner
    gc.collect()
    before = (tmp_path / "run" / "logs.csv").read_text()
    with pytest.raises(UsageError, match=r"no model\.tar to resume from.* use another log_dir"):
        Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    assert (tmp_path / "run" / "logs.csv").read_text() == before
    (tmp_path / "run" / "logs.csv").unlink()
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as anew:
        anew.step()
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [STEPS]


def test_a_closed_run_says_that_it_was_closed(tmp_path: Path) -> None:
    learner = Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    learner.step()
    learner.close()
    with pytest.raises(UsageError, match="it was closed after 20 steps; .* the same log_dir"):
        learner.step()


def test_a_cell_that_is_run_again_ends_the_learner_before(tmp_path: Path) -> None:
    first = Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    first.step()
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as second:
        assert second.steps == STEPS
        with pytest.raises(UsageError, match="the run has ended: another Learner was made with"):
            first.step()


def test_a_learner_that_cannot_be_made_leaves_the_one_before_closed(tmp_path: Path) -> None:
    first = Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    first.step()
    with pytest.raises(UsageError, match="^algo must be ppo"):
        Learner(impala_of(), 10 * STEPS, tmp_path / "run")
    with pytest.raises(UsageError, match="it was closed after 20 steps; make another Learner"):
        first.step()


class Refusing:
    def open(self, run: Any) -> Any:
        raise UsageError("no account")


def test_a_run_that_cannot_be_assembled_was_not_successful(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no account"):
        Learner(scheme_of(), 100, tmp_path / "run", loggers=[Refusing()])
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is False


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (impala_of, "^algo must be ppo, as in the run run, not impala"),
        (lambda: scheme_of(recurrent=True), "^use_lstm must be False, as in the run run, not True"),
        (
            lambda: scheme_of({"env_fn": torchbeast.make_env, "env_kwargs": {"env": "Dials"}}),
            "env must be Catch, as in the run run, not Dials",
        ),
        (
            lambda: scheme_of(algo=PPO.create_factory(reward_clipping="abs_one")),
            "^normalise_returns scales rewards by their returns",
        ),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, other: Any, sentence: str) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as learner:
        learner.step()
    with pytest.raises(UsageError, match=sentence):
        Learner(other(), 10 * STEPS, tmp_path / "run")


def test_a_refused_checkpoint_leaves_the_learner_its_agent(tmp_path: Path) -> None:
    dials = {"env_fn": torchbeast.make_env, "env_kwargs": {"env": "Dials"}}
    with Learner(scheme_of(dials), STEPS, tmp_path / "other") as other:
        other.step()
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as learner:
        learner.step()
        before = weights_of(learner)
        with pytest.raises(UsageError, match="^env must be Dials, as in"):
            learner.restore(tmp_path / "other" / "model.tar")
        assert_same(before, weights_of(learner))
        learner.step()
    assert checkpoints.load(tmp_path / "run" / "model.tar")["stats"]["step"] == 2 * STEPS


def test_no_sentence_names_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Learner(scheme_of(), 10 * STEPS, tmp_path / "run") as learner:
        learner.step()
        with pytest.raises(UsageError, match="there is no checkpoint at"):
            learner.restore(tmp_path / "nothing.tar")
    with pytest.raises(UsageError, match="num_mini_batch 400 is more .* or a larger batch_size"):
        many = PPO.create_factory(num_epochs=1, num_mini_batch=400)
        Learner(scheme_of(algo=many), 10 * STEPS, tmp_path / "other").step()
    said = capsys.readouterr()
    assert "Rewards: unclipped" in said.out and "--" not in said.out + said.err


@pytest.mark.parametrize(
    ("axes", "said"), [({}, ""), later({"col_remote_workers": 1}, "Starting 1 worker.\n")]
)
def test_workers_are_announced_before_they_start(
    tmp_path: Path, axes: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Further tests below have several."""
    with Learner(scheme_of(**axes), 10 * STEPS, tmp_path / "run") as learner:
        capsys.readouterr()
        learner.step()
        learner.step()
    assert capsys.readouterr().out == said


def test_the_programs_evaluate_and_resume_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Learner(scheme_of(), 2 * STEPS, tmp_path / "run") as learner:
        learner.train()
    named = ["--savedir", str(tmp_path), "--xpid", "run"]
    assert monobeast.main([*named, "--mode", "test", "--num_episodes", "2"]) == 0
    assert "Catch, " in capsys.readouterr().out
    assert monobeast.main([*named, "--total_steps", str(4 * STEPS)]) == 0
    assert [row["step"] for row in read_logs(tmp_path / "run")][-1] == 4 * STEPS


def test_an_actor_begins_with_given_weights(tmp_path: Path) -> None:
    with Learner(scheme_of(), 4 * STEPS, tmp_path / "first", seed=1) as learner:
        learner.train()
        path = learner.save_model(tmp_path / "kept.tar")
        expected = weights_of(learner)
    scheme = scheme_of()
    factory = scheme.actor_factory
    begun = type(factory)(**{**vars(factory), "restart_model": path})
    scheme = Scheme(**{**vars(scheme), "actor_factory": begun})
    with Learner(scheme, 4 * STEPS, tmp_path / "second", seed=2) as learner:
        assert_same(weights_of(learner), expected)
        assert learner.steps == 0


# --- failures and interrupts


class Fragile(gymnasium.Env):
    """Raises in its 25th step; afterwards it works."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    error: BaseException = KeyError("the joystick is gone")
    left = 25

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        type(self).left -= 1
        if self.left == 0:
            raise self.error
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Interrupted(Fragile):
    """Ctrl-C arrives in its 25th step."""

    error = KeyboardInterrupt()
    left = 25


def test_an_environment_that_raises_ends_the_run_with_its_lines(tmp_path: Path) -> None:
    learner = Learner(scheme_of({"env_fn": Fragile}), 100, tmp_path / "run")
    learner.step()
    learner.step()
    with pytest.raises(RunError, match=r"(?s)environments: .*in step.*KeyError"):
        learner.step()
    saved = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")
    assert saved["stats"]["step"] == 20, "what was learnt is kept"
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is False
    with pytest.raises(UsageError, match=r"it failed after 20 steps \(.*joystick.*same log_dir"):
        learner.step()


def test_after_an_interrupt_the_next_step_goes_on(tmp_path: Path) -> None:
    with Learner(scheme_of({"env_fn": Interrupted}), 100, tmp_path / "run") as learner:
        learner.train(20)
        with pytest.raises(KeyboardInterrupt):
            learner.step()
        assert learner.steps == 20
        assert learner.train(40)["step"] == 40


class InterruptedLaser(LASER):
    """Ctrl-C arrives in its third update."""

    left = 3

    def losses(self, batch: Any) -> Any:
        type(self).left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().losses(batch)


@pytest.mark.parametrize("axes", [{}, {"col_remote_workers": 2}])
def test_after_an_interrupted_update_with_replayed_rollouts_the_next_step_goes_on(
    axes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterruptedLaser, "left", 3)
    storage = OnPolicyVTraceBuffer.create_factory(size=10, replay_size=400, replay_ratio=1.0)
    algo = InterruptedLaser.create_factory()
    scheme = scheme_of(algo=algo, storage=storage, recurrent=True, **axes)
    with Learner(scheme, 10_000, tmp_path / "run") as learner:
        learner.step()
        learner.step()
        with pytest.raises(KeyboardInterrupt):
            learner.step()
        assert max(learner.step()["max_lag"] for _ in range(4)) <= 1


def test_after_a_nan_the_checkpoint_stays_as_it_was(tmp_path: Path) -> None:
    learner = Learner(scheme_of(), 10 * STEPS, tmp_path / "run")
    learner.train(STEPS)
    learner.save_model()
    with torch.no_grad():
        next(learner.actor.parameters()).fill_(float("nan"))
    with pytest.raises(RunError, match="NaN|finite"):
        learner.step()
    saved = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")
    assert all(tensor.isfinite().all() for tensor in saved["model_state_dict"].values())


# --- what it leaves alone, and behind


def test_no_signal_is_taken_over_and_nothing_stays_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers, threads = [signal.getsignal(n) for n in numbers], threading.active_count()
    with Learner(scheme_of(**TWO_PROCESSES), 10**6, tmp_path / "run") as learner:
        learner.step()
        assert capsys.readouterr().out.endswith("Starting 2 workers.\n")
        assert [signal.getsignal(number) for number in numbers] == handlers
        assert len(warm.children()) == 2
    assert warm.children() == [] and threading.active_count() <= threads


def test_a_learner_that_is_forgotten_ends_its_processes(tmp_path: Path) -> None:
    learner = Learner(scheme_of(**TWO_PROCESSES), 10**6, tmp_path / "run")
    learner.step()
    processes = warm.children()
    assert len(processes) == 2
    del learner
    gc.collect()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


def test_one_process_needs_no_ray_no_flags_and_nothing_that_is_compiled(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from small_schemes import scheme_of
from torchbeast import Learner
Learner(scheme_of(), 20, {str(tmp_path / "run")!r}).train()
print([name for name in ("ray", "tyro", "libtorchbeast", "nest") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[-1] == "[]"


# --- collection in processes


@pytest.mark.parametrize("communication", ["synchronous", "asynchronous"])
def test_a_function_of_a_notebook_reaches_the_processes(tmp_path: Path, communication: str) -> None:
    limit = 7

    def make_env() -> Any:
        return gymnasium.make("CartPole-v1", max_episode_steps=limit)

    axes = {"col_remote_workers": 1, "col_communication": communication}
    scheme = scheme_of({"env_fn": make_env, "vec_env_size": 2}, **axes)
    with Learner(scheme, 10**6, tmp_path / "run") as learner:
        found = [learner.step() for _ in range(4)]
        assert 0 < learner.get_metrics()["mean_length"] <= limit
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is True
    assert all(metrics["max_lag"] <= 8 for metrics in found), "slots bound it"


@pytest.mark.parametrize(
    "how", [later(""), ", col_communication='asynchronous', inference='central'"]
)
def test_a_script_in_another_folder_brings_its_own_modules(tmp_path: Path, how: str) -> None:
    if "central" in how:
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_env.py").write_text(
        "import gymnasium\ndef make(): return gymnasium.make('CartPole-v1')\n"
    )
    (tmp_path / "code" / "script.py").write_text(f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from my_env import make
from small_schemes import scheme_of
from torchbeast import Learner
scheme = scheme_of({{"env_fn": make, "vec_env_size": 2}}, col_remote_workers=1{how})
Learner(scheme, 40, {str(tmp_path / "run")!r}).train()
""")
    script = [sys.executable, str(tmp_path / "code" / "script.py")]
    assert warm.Popen(script, cwd=tmp_path).wait(300) == 0
    assert (tmp_path / "run" / "model.tar").exists()


@pytest.mark.long
def test_what_is_printed_by_workers_of_a_gradient_worker_is_logged(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(
        "import gymnasium\n"
        "def make():\n"
        "    print('hello from the game', flush=True)\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    (tmp_path / "script.py").write_text(f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from my_env import make
from small_schemes import scheme_of
from torchbeast import Learner
workers = dict(grad_remote_workers=1, col_remote_workers=1)
Learner(scheme_of({{"env_fn": make, "vec_env_size": 2}}, **workers), 400, "run").train()
""")
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=300)
    log = (tmp_path / "run" / "out.log").read_text()
    assert "gradient worker 0: worker 0: hello from the game" in log


def test_every_action_of_a_synchronous_batch_is_chosen_with_the_newest_weights(
    tmp_path: Path,
) -> None:
    with Learner(scheme_of(**TWO_PROCESSES), 10**6, tmp_path / "run") as learner:
        batches: list[Rollout] = []
        take_step = learner._run.made.optimiser_step.update

        def update(batch: Rollout) -> Any:
            batches.append(batch.map(torch.clone))
            return take_step(batch)

        learner._run.made.optimiser_step.update = update  # type: ignore[method-assign]
        learner.train(5 * 10 * 4)
        assert len(batches) == 5
        for number, batch in enumerate(batches):
            assert batch.reward.shape == (11, 4), "one rollout of every environment"
            assert batch.env_index[0].tolist() == [0, 1, 2, 3]
            assert batch.rollout_index.eq(number).all()
            assert batch.policy_version[1:].eq(number).all()


def seen_seeds(scheme: Scheme, path: Path) -> set[int]:
    """Returns what the environments of a first batch say of their seeds."""
    with Learner(scheme, 10**6, path, seed=1) as learner:
        return set(next_batch(learner).observation[0, :, 0].tolist())


def test_every_environment_has_a_seed_of_its_own(tmp_path: Path) -> None:
    numbered = {"env_fn": torchbeast.make_env, "env_kwargs": {"env": "source_envs:Numbered"}}
    envs = {**numbered, "vec_env_size": 3}
    alone = seen_seeds(scheme_of(envs), tmp_path / "alone")
    spread = seen_seeds(scheme_of(envs, **TWO_PROCESSES), tmp_path / "spread")
    assert len(alone) == 3 and len(spread) == 6
    assert alone < spread, "the first worker's are those of one process"


@pytest.mark.long
def test_the_environments_of_gradient_workers_have_seeds_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes start as in a program, where nothing is imported yet."""
    monkeypatch.setattr(child_process, "subprocess", subprocess)
    seeds = tmp_path / "seeds"
    seeds.mkdir()

    def make_env() -> Any:
        class Noting(gymnasium.Wrapper):
            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                if seed is not None:
                    (seeds / str(seed)).touch()
                return self.env.reset(seed=seed)

        return Noting(gymnasium.make("CartPole-v1"))

    scheme = scheme_of({"env_fn": make_env, "vec_env_size": 2}, grad_remote_workers=2)
    with Learner(scheme, 10**6, tmp_path / "run") as learner:
        learner.step()
        assert capsys.readouterr().out.endswith("Starting 2 gradient workers.\n")
    assert len(list(seeds.iterdir())) == 4


def test_laser_learns_from_a_replay(tmp_path: Path) -> None:
    storage = OnPolicyVTraceBuffer.create_factory(size=10, replay_size=400)
    scheme = scheme_of(algo=LASER.create_factory(), storage=storage)
    with Learner(scheme, 10 * STEPS, tmp_path / "run") as learner:
        metrics = learner.train()
    assert metrics["replay_fill"] > 0 and "relevant_share" in metrics
    assert learner.steps == 10 * STEPS, "replayed steps do not count"


def test_a_recurrent_agent_learns(tmp_path: Path) -> None:
    algo = PPO.create_factory(num_epochs=1, num_mini_batch=2)
    with Learner(scheme_of(algo=algo, recurrent=True), 5 * STEPS, tmp_path / "run") as learner:
        learner.step()
        batch = next_batch(learner)
        states = [leaf for leaf in batch.initial_agent_state]
        assert any(leaf.abs().sum() > 0 for leaf in states)


def test_an_algorithm_of_ones_own_learns(tmp_path: Path) -> None:
    from examples.advantage_actor_critic import AdvantageActorCritic

    scheme = scheme_of(
        algo=AdvantageActorCritic.create_factory(lr=1e-3),
        storage=OnPolicyBuffer.create_factory(size=10),
    )
    with Learner(scheme, 2 * STEPS, tmp_path / "run") as learner:
        assert learner.train()["step"] == 2 * STEPS
    recorded = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")["flags"]["algo"]
    assert recorded == "examples.advantage_actor_critic:AdvantageActorCritic"


STEPPING = threading.Event()  # set while a step of the learner is in progress
STRAY: list[int] = []  # environment steps outside one, each the number of environments


def watched(num_envs: int) -> Any:
    """Catch that notes when it is played."""
    env: Any = make_env("Catch", num_envs)
    step = env.step

    def noted(action: Any) -> Any:
        if not STEPPING.is_set():
            STRAY.append(num_envs)
        return step(action)

    env.step = noted
    return env


def test_with_a_replay_but_no_workers_nothing_is_played_ahead(tmp_path: Path) -> None:
    """What is played within an earlier step has older weights; the rest is played outside steps."""
    storage = OnPolicyVTraceBuffer.create_factory(size=10, replay_size=400)
    envs = {"env_fn": watched, "vec_env_size": 2}
    scheme = scheme_of(envs, algo=LASER.create_factory(), storage=storage)
    STRAY.clear()
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        random = torch.get_rng_state()
        for _ in range(5):
            STEPPING.set()
            lag = learner.step()["max_lag"]
            STEPPING.clear()
            assert lag == 0 and torch.equal(random, torch.get_rng_state())
    assert not STRAY


def test_a_learner_that_takes_no_step_does_not_make_a_failed_run_successful(tmp_path: Path) -> None:
    fragile = {"env_fn": type("Fragile", (Fragile,), {"left": 25, "__qualname__": "Fragile"})}
    with pytest.raises(RunError):
        Learner(scheme_of(fragile), 100, tmp_path / "run").train()
    with pytest.raises(UsageError, match="^env must be"):
        Learner(scheme_of(), 100, tmp_path / "run")
    Learner(scheme_of(fragile), 100, tmp_path / "run").close()
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is False


def test_a_number_of_steps_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    Learner(scheme_of(), 1e2, tmp_path / "run").close()  # type: ignore[arg-type]
    assert '"total_steps": 100,' in (tmp_path / "run" / "meta.json").read_text()


def test_gradient_workers_do_not_read_the_file_of_the_first_weights(tmp_path: Path) -> None:
    with Learner(scheme_of(), STEPS, tmp_path / "first") as learner:
        learner.step()
        path = learner.save_model(tmp_path / "kept.tar")
    scheme = scheme_of(grad_remote_workers=1)
    begun = replace(scheme.actor_factory, restart_model=path)
    with Learner(replace(scheme, actor_factory=begun), 10**6, tmp_path / "second") as learner:
        path.unlink()  # as on a node that does not see it
        assert learner.step()["updates"] == 1
