# SPDX-License-Identifier: Apache-2.0
"""--eval_every and --callback: what a program's run does between its updates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from background import wait_for
from test_learner_run import EndingSource, plan_of, train_from, train_with
from test_training import B, T, rollout

from torchbeast.cli.command_line import flatten
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.contract import CollectionPlan
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.envs import EnvOptions, EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.learner import Callback, Evaluation
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import RunConfig, session
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.callbacks import ProgramLearner, RunningLearner, keep_numbers
from torchbeast.run.config import CallbacksConfig, TrainingConfig
from torchbeast.run.episodes import Episodes
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.training import DONE
from torchbeast.seeds import seed_of

STEPS = T * B  # of an update
ENV = "four_numbers:FourNumbers"
HERE = "test_callbacks_of_programs"


def flags(folder: Path, total: int = 100_000, **callbacks: Any) -> MonoBeastFlags:
    return MonoBeastFlags(
        run=RunConfig(savedir=str(folder), xpid="run", seed=1),
        training=TrainingConfig(total_steps=total),
        callbacks=CallbacksConfig(**callbacks),
    )


def learn(folder: Path, updates: int, total: int = 100_000, **callbacks: Any) -> None:
    """Learns this number of batches, which are the same in every run; resumes the run."""
    torch.manual_seed(3)
    batches = [rollout(reward=float(i)) for i in range(updates)]
    train_from(lambda: EndingSource(batches), flags(folder, total, **callbacks), ENV)


def saved(folder: Path, name: str = "model.tar") -> dict[str, Any]:
    return checkpoints.load(folder / "run" / name)


def scores(folder: Path) -> list[tuple[float, float]]:
    rows = read_logs(folder / "run" / "evaluations.csv")
    return [(row["step"], row["mean_episode_return"]) for row in rows]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Mean returns of the next evaluations."""
    left: list[float] = []

    def evaluate(_: RunningLearner, num_episodes: int, **how: Any) -> Episodes:
        score = left.pop(0)
        return Episodes([score] * num_episodes, [3] * num_episodes, [0] * num_episodes)

    monkeypatch.setattr(RunningLearner, "evaluate", evaluate)
    monkeypatch.setattr(ProgramLearner, "_envs_for", lambda *_: None)
    yield left
    assert not left, "every evaluation took place"


def test_a_run_is_bit_equal_with_and_without_evaluations(tmp_path: Path) -> None:
    learn(tmp_path / "alone", 5)
    learn(tmp_path / "evaluated", 5, eval_every=2 * STEPS, eval_episodes=3)
    alone, evaluated = saved(tmp_path / "alone"), saved(tmp_path / "evaluated")
    assert alone["stats"] == evaluated["stats"]
    assert torch.equal(alone["rng"]["torch"], evaluated["rng"]["torch"])
    for name, tensor in alone["model_state_dict"].items():
        assert torch.equal(tensor, evaluated["model_state_dict"][name]), name
    assert [step for step, _ in scores(tmp_path / "evaluated")] == [2 * STEPS, 4 * STEPS]
    rows = list(read_logs(tmp_path / "evaluated" / "run"))
    assert [row["step"] for row in rows if "evaluation_mean_return" in row] == [20, 40]
    assert {row.get("evaluation_mean_length", 3) for row in rows} == {3}


def test_evaluations_of_a_resumed_run_are_at_the_multiples_too_without_a_double_row(
    tmp_path: Path, chosen: list[float]
) -> None:
    every = dict(eval_every=2 * STEPS, eval_episodes=1)
    chosen += [1.0]
    learn(tmp_path, 2, **every)
    chosen += [2.0]
    learn(tmp_path, 3, **every)
    chosen += [3.0, 4.0]
    learn(tmp_path, 2, total=7 * STEPS, **every)
    assert scores(tmp_path) == [(20, 1.0), (40, 2.0), (60, 3.0), (70, 4.0)]


def test_a_last_evaluation_that_a_signal_interrupts_is_made_up_for_once(
    tmp_path: Path,
    chosen: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons: list[str] = []
    stop = Supervisor.stop

    def noted(self: Supervisor, reason: str) -> None:
        reasons.append(reason)
        stop(self, reason)

    last = dict(total=2 * STEPS, eval_every=2 * STEPS, eval_episodes=1)
    with pytest.raises(RunError, match="evaluation"):  # no scores are left
        learn(tmp_path, 2, **last)
    chosen += [3.0]
    monkeypatch.setattr(Supervisor, "stop", noted)
    learn(tmp_path, 2, **last)
    assert reasons[0] == DONE, "hosts that dial in may end"
    assert scores(tmp_path) == [(20, 3.0)] and saved(tmp_path)["stats"]["step"] == 2 * STEPS
    assert saved(tmp_path)["callbacks"]["evaluation"] == {"best": 3.0, "step": 2 * STEPS}
    assert "already complete" not in capsys.readouterr().out
    learn(tmp_path, 2, **last)
    assert "already complete" in capsys.readouterr().out


def test_rows_that_a_killed_run_wrote_after_its_checkpoint_are_dropped(
    tmp_path: Path, chosen: list[float]
) -> None:
    every = dict(eval_every=STEPS, eval_episodes=1)
    chosen += [1.0]
    learn(tmp_path, 1, **every)
    kept = (tmp_path / "run" / "model.tar").read_bytes()
    chosen += [2.0]
    learn(tmp_path, 1, **every)
    (tmp_path / "run" / "model.tar").write_bytes(kept)
    chosen += [3.0]
    learn(tmp_path, 1, **every)
    assert scores(tmp_path) == [(10, 1.0), (20, 3.0)]


def test_the_best_weights_are_kept_over_a_resume(tmp_path: Path, chosen: list[float]) -> None:
    every = dict(eval_every=STEPS, eval_episodes=1)
    chosen += [5.0]
    learn(tmp_path, 1, **every)
    chosen += [4.0]
    learn(tmp_path, 1, **every)
    best = saved(tmp_path, "evaluation_best.tar")
    assert best["stats"]["step"] == STEPS and best["callbacks"]["evaluation"]["best"] == 5.0
    chosen += [6.0]
    learn(tmp_path, 1, **every)
    assert saved(tmp_path, "evaluation_best.tar")["stats"]["step"] == 3 * STEPS


@pytest.mark.parametrize(("pool", "is_ranked"), [(None, True), ("pool", False)])
def test_evaluations_of_self_play_are_not_ranked(pool: str | None, is_ranked: bool) -> None:
    env = EnvSpec("Game", options=EnvOptions(selfplay=pool))
    spaces = ArraySpec((4,), "float32"), Discrete(3), 1
    collection = CollectionPlan(num_envs=4, processes=2, fixed_lag=None)
    plan = flags(Path("x"), eval_every=10).plan("monobeast", env, spaces, collection)
    (evaluation,) = plan.callbacks
    assert isinstance(evaluation, Evaluation) and evaluation._keeps_best == is_ranked


def test_an_environment_that_cannot_be_made_here_ends_the_run_before_it_is_recorded(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="there is no module nowhere"):
        train_with(flags(tmp_path, eval_every=100), "nowhere:Env", 1.0)
    assert not (tmp_path / "run").exists()


# --- callbacks


class Counting(Callback):
    """Adds a column, and ends the run after three updates in all."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        self.count += 1
        metrics["count"] = self.count + 0 * learner.get_metrics()["updates"]
        if self.count == 3:
            learner.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Failing(Callback):
    """Fails in the second update."""

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        if learner.updates == 2:
            learner.save_model()  # while no update can run
            raise KeyError("the disk of results")


class Needing(Callback):
    """Needs an argument."""

    def __init__(self, goal: float) -> None:
        self.goal = goal


def test_a_callback_adds_columns_is_resumed_and_stops_the_run(tmp_path: Path) -> None:
    learn(tmp_path, 2, callback=(f"{HERE}:Counting",))
    learn(tmp_path, 5, callback=(f"{HERE}:Counting",))
    rows = list(read_logs(tmp_path / "run"))
    assert [(row["step"], row["count"]) for row in rows] == [(10, 1), (20, 2), (30, 3)]
    assert saved(tmp_path)["callbacks"] == {"Counting": {"count": 3}}


def test_an_error_of_a_callback_ends_the_run_with_its_name_and_keeps_what_was_learnt(
    tmp_path: Path,
) -> None:
    with pytest.raises(RunError, match=r"(?s)callback Failing: .*the disk of results"):
        learn(tmp_path, 4, callback=(f"{HERE}:Failing",))
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [10, 20]
    assert saved(tmp_path)["stats"]["step"] == 2 * STEPS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:Countin", "has no 'Countin'; did you mean Counting"),
        ("nowhere:Callback", "there is no module nowhere"),
        ("math:pi", "pi is 3.14"),
        (f"{HERE}:Path", "is a .*Path: expected a subclass of torchbeast.learner.Callback"),
        (f"{HERE}:Needing", "missing .*'goal'"),
    ],
)
def test_a_wrong_callback_is_refused_before_training(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        learn(tmp_path, 1, callback=(name,))
    assert not (tmp_path / "run").exists()


def test_runs_with_other_seeds_are_evaluated_from_other_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an interval over seeds contains the chance of the starts."""
    seeds: list[int] = []

    def evaluate(_: RunningLearner, num_episodes: int, *, seed: int, **how: Any) -> Episodes:
        seeds.append(seed)
        return Episodes([1.0] * num_episodes, [3] * num_episodes, [0] * num_episodes)

    monkeypatch.setattr(RunningLearner, "evaluate", evaluate)
    monkeypatch.setattr(ProgramLearner, "_envs_for", lambda *_: None)
    for seed in (1, 2):
        usual = flags(tmp_path / str(seed), 2 * STEPS, eval_every=2 * STEPS, eval_episodes=1)
        train_with(replace(usual, run=replace(usual.run, seed=seed)), ENV, 1.0, 1.0)
    assert len({*seeds}) == 2


def test_a_run_that_draws_its_seed_is_evaluated_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def evaluate(_: RunningLearner, num_episodes: int, *, seed: int, **how: Any) -> Episodes:
        seeds.append(seed)
        return Episodes([1.0], [3], [0])

    monkeypatch.setattr(RunningLearner, "evaluate", evaluate)
    monkeypatch.setattr(ProgramLearner, "_envs_for", lambda *_: None)
    usual = flags(tmp_path, 2 * STEPS, eval_every=2 * STEPS, eval_episodes=1)
    train_with(replace(usual, run=replace(usual.run, seed=None)), ENV, 1.0, 1.0)
    assert seeds == [seed_of(saved(tmp_path)["flags"]["seed"], "evaluation", 2 * STEPS)]


class Enough(Callback):
    """Ends the run after a good evaluation."""

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        if metrics.get("evaluation_mean_return", 0.0) >= 2.0:
            learner.stop()


def test_a_callback_sees_the_evaluation_of_its_step(tmp_path: Path, chosen: list[float]) -> None:
    chosen += [1.0, 2.0]
    learn(tmp_path, 9, eval_every=STEPS, eval_episodes=1, callback=(f"{HERE}:Enough",))
    assert scores(tmp_path) == [(10, 1.0), (20, 2.0)]


def test_weights_at_which_a_callback_stops_are_evaluated(
    tmp_path: Path, chosen: list[float]
) -> None:
    chosen += [1.0]
    learn(tmp_path, 9, eval_every=100 * STEPS, eval_episodes=1, callback=(f"{HERE}:Counting",))
    assert scores(tmp_path) == [(30, 1.0)]


def test_the_state_before_a_nan_has_those_of_callbacks(tmp_path: Path) -> None:
    batches = [rollout(), rollout(reward=float("nan"))]
    named = flags(tmp_path, callback=(f"{HERE}:Counting",))
    with pytest.raises(RunError, match="loss is nan"):
        train_from(lambda: EndingSource(batches), named, ENV)
    assert saved(tmp_path, "last_good.tar")["callbacks"] == {"Counting": {"count": 1}}


def test_metrics_of_callbacks_are_numbers_that_logs_can_be_read_with() -> None:
    metrics: dict[str, Any] = {"solved": True, "count": 3}
    keep_numbers(metrics)
    assert [type(value) for value in metrics.values()] == [float, int]


class Unsaved(Counting):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("a bug")


def test_a_state_that_cannot_be_collected_does_not_hide_the_nan(tmp_path: Path) -> None:
    batches = [rollout(reward=float("nan"))]
    with pytest.raises(RunError, match="loss is nan.*could not be saved: 'a bug'"):
        train_from(
            lambda: EndingSource(batches), flags(tmp_path, callback=(f"{HERE}:Unsaved",)), ENV
        )
    assert not (tmp_path / "run" / "model.tar").exists()


def test_a_part_of_a_run_without_a_callback_keeps_its_state(tmp_path: Path) -> None:
    learn(tmp_path, 1, callback=(f"{HERE}:Counting",))
    learn(tmp_path, 1)
    assert saved(tmp_path)["callbacks"] == {"Counting": {"count": 1}}


def test_a_damaged_file_of_the_best_weights_ends_no_run(
    tmp_path: Path, chosen: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    every = dict(eval_every=STEPS, eval_episodes=1)
    chosen += [5.0, 4.0]
    learn(tmp_path, 1, **every)
    (best := tmp_path / "run" / "evaluation_best.tar").write_bytes(b"cut off")
    learn(tmp_path, 1, **every)
    assert f"{best} is damaged" in capsys.readouterr().err
    assert saved(tmp_path, best.name)["callbacks"]["evaluation"]["best"] == 4.0


def test_the_command_that_resumes_names_the_environment_of_evaluations(
    tmp_path: Path, chosen: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen += [1.0]
    named = EnvSpec("mine:make", {"size": 6})
    usual = flags(tmp_path, STEPS, eval_every=STEPS, eval_episodes=1)
    plan = plan_of(usual, lambda _: EndingSource([rollout()]), env_id=named.name)
    plan = replace(plan, env=named, asked=named, others_serve=True)
    with session(usual.run.folder, flatten(usual)) as opened:
        LearnerRun(plan, opened).train()
    assert "--env mine:make --env_kwargs" in capsys.readouterr().out.partition("To resume:")[2]


class Opening(Callback):
    """Leaves a file at the end."""

    def on_end(self, learner: RunningLearner) -> None:
        (learner.log_dir / "closed").touch()


class Reporting(Callback):
    """Evaluates at the end."""

    def on_end(self, learner: RunningLearner) -> None:
        (learner.log_dir / "returns").write_text(str(learner.evaluate(2).returns))


def test_a_callback_may_evaluate_at_the_end_of_a_complete_run(tmp_path: Path) -> None:
    learn(tmp_path, 2, total=2 * STEPS, callback=(f"{HERE}:Reporting",))
    assert (tmp_path / "run" / "returns").exists()


class Refusing(Callback):
    """Cannot start."""

    def on_start(self, learner: RunningLearner) -> None:
        raise KeyError("no licence")


def test_callbacks_that_have_started_end_if_a_later_one_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"(?s)callback Refusing: .*no licence"):
        learn(tmp_path, 1, callback=(f"{HERE}:Opening", f"{HERE}:Refusing"))
    assert (tmp_path / "run" / "closed").exists()


class Signalled(Reporting):
    """A signal ends its run."""

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_at_the_end_after_a_signal_fails_no_run(tmp_path: Path) -> None:
    learn(tmp_path, 1, callback=(f"{HERE}:Signalled",))
    assert saved(tmp_path)["stats"]["step"] == STEPS
    assert not (tmp_path / "run" / "returns").exists()


class Killing(Callback):
    """Kills the environments' process between two evaluations."""

    def on_step(self, learner: Any, metrics: dict[str, float]) -> None:
        learner.evaluate(1)
        process = learner._env._worker.process
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: process.has_ended)
        metrics["again"] = learner.evaluate(1).mean


def test_environments_that_were_killed_between_evaluations_are_made_anew(tmp_path: Path) -> None:
    learn(tmp_path, 1, callback=(f"{HERE}:Killing",))
    assert all("again" in row for row in read_logs(tmp_path / "run"))
