# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a Learner: when they are called, what their errors do, and what is remembered."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small_schemes import scheme_of

import torchbeast
from torchbeast import Learner, RunError, UsageError
from torchbeast.envs.toy import Catch
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.learner import Callback, Checkpoints, Evaluation
from torchbeast.reporting import StdoutLogger
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run import periodic as builtin_callbacks
from torchbeast.run.callbacks import RunningLearner
from torchbeast.run.episodes import Episodes

STEPS = 2 * 10  # of an update


class Noting(Callback):
    """Notes its calls, and adds a figure."""

    def __init__(self, calls: list[Any], name: str = "Noting") -> None:
        self.calls, self._name = calls, name

    @property
    def name(self) -> str:
        return self._name

    def on_start(self, learner: RunningLearner) -> None:
        self.calls.append((self.name, "start", learner.steps))

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert metrics["learnt_steps"] == learner.steps
        self.calls.append((self.name, "step", learner.steps))
        metrics[f"of_{self.name}"] = torch.tensor(float(learner.updates))  # type: ignore

    def on_end(self, learner: RunningLearner) -> None:
        self.calls.append((self.name, "end", learner.steps))


class Failing(Callback):
    """Raises in one of its methods."""

    def __init__(self, method: str, error: BaseException) -> None:
        setattr(self, method, self._raise)
        self.error: BaseException | None = error

    def _raise(self, *_: object) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class Remembering(Callback):
    """Counts its steps, across restarts."""

    def __init__(self, state: Any = 0) -> None:
        self.count = state

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        if isinstance(self.count, int):
            self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


# --- the protocol


def test_callbacks_are_called_in_order_around_every_update(tmp_path: Path) -> None:
    calls: list[Any] = []
    both = [Noting(calls, "a"), Noting(calls, "b")]
    learner = Learner(scheme_of(), 2 * STEPS, tmp_path / "run", callbacks=both)
    assert calls == [], "nothing is called before the first step"
    learner.train()
    learner.close()
    assert calls == [
        ("a", "start", 0),
        ("b", "start", 0),
        ("a", "step", STEPS),
        ("b", "step", STEPS),
        ("a", "step", 2 * STEPS),
        ("b", "step", 2 * STEPS),
        ("a", "end", 2 * STEPS),
        ("b", "end", 2 * STEPS),
    ]


def test_figures_of_callbacks_are_in_the_row_of_their_update_and_in_the_metrics(
    tmp_path: Path,
) -> None:
    with Learner(scheme_of(), 5 * STEPS, tmp_path / "run", callbacks=[Noting([])]) as learner:
        assert [learner.step()["of_Noting"] for _ in range(2)] == [1.0, 2.0]
        rows = list(read_logs(tmp_path / "run"))
    assert [(row["step"], row["of_Noting"]) for row in rows] == [(STEPS, 1), (2 * STEPS, 2)]


def test_loggers_get_the_figures_of_callbacks_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers = [StdoutLogger(["of_Noting", "episodes"], every_seconds=0)]
    with Learner(
        scheme_of(), 10**6, tmp_path / "run", callbacks=[Noting([])], loggers=loggers
    ) as learner:
        learner.train(2 * STEPS)
    printed = capsys.readouterr().out.splitlines()[-2:]
    assert printed == ["step 20  episodes 2  of_Noting 1", "step 40  episodes 4  of_Noting 2"]


def test_a_callback_ends_the_run_as_its_target_would(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
            if learner.updates == 2:
                learner.stop()

    learner = Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[Enough()])
    assert learner.train()["step"] == 2 * STEPS and learner.done()
    assert torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")["stats"]["step"] == 40
    with Learner(scheme_of(), 10**6, tmp_path / "run") as again:
        assert not again.done() and again.step()["step"] == 3 * STEPS


def test_a_learner_that_takes_no_step_calls_nothing(tmp_path: Path) -> None:
    calls: list[Any] = []
    Learner(scheme_of(), 100, tmp_path / "run", callbacks=[Noting(calls)]).close()
    assert calls == []


def test_a_restored_learner_begins_anew(tmp_path: Path) -> None:
    calls: list[Any] = []
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[Noting(calls)]) as learner:
        learner.step()
        saved = learner.save_model(tmp_path / "kept.tar")
        learner.step()
        learner.restore(saved)
        learner.step()
    steps = [call[1:] for call in calls]
    assert steps == [
        *[("start", 0), ("step", STEPS), ("step", 2 * STEPS), ("end", 2 * STEPS)],
        *[("start", STEPS), ("step", 2 * STEPS), ("end", 2 * STEPS)],
    ]


def test_two_callbacks_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="several callbacks have the name 'evaluation'"):
        Learner(scheme_of(), 100, tmp_path / "run", callbacks=[Evaluation(10), Evaluation(20)])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([dict], r"got <class 'dict'>, write dict\(\)"),
        ([Checkpoints], r"subclasses of Callback, got .*, write Checkpoints\(\)"),
    ],
)
def test_anything_but_a_callback_is_refused(tmp_path: Path, callbacks: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Learner(scheme_of(), 100, tmp_path / "run", callbacks=callbacks)


class Stepping(Callback):
    """Steps the Learner that calls it."""

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        assert isinstance(learner, Learner)
        learner.step()


def test_a_callback_that_steps_the_learner_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[Stepping()]) as learner:
        with pytest.raises(RunError, match=r"(?s)callback Stepping.*step\(\) cannot be called"):
            learner.step()
        assert learner.updates == 1


def test_a_checkpoint_that_is_not_there_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with Learner(scheme_of(), 10**6, tmp_path / "run") as learner:
        with pytest.raises(UsageError, match=r"no checkpoint at .*missing\.tar: "):
            learner.restore(tmp_path / "missing.tar")
        learner.step()


def test_a_run_whose_newest_checkpoint_is_gone_is_restored_from_the_one_before(
    tmp_path: Path,
) -> None:
    with Learner(scheme_of(), 10**6, tmp_path / "run") as learner:
        learner.step()
        learner.save_model()
        steps = learner.steps
        learner.step()
        learner.save_model()
        (tmp_path / "run" / "model.tar").unlink()
        learner.restore(tmp_path / "run" / "model.tar")
        assert learner.steps == steps


# --- errors and interrupts


class Worded(Callback):
    """Adds a figure that is no number."""

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        metrics["mood"] = "good"  # type: ignore[assignment]


def test_a_figure_that_is_no_number_is_refused_with_its_callback(tmp_path: Path) -> None:
    learner = Learner(scheme_of(), 100, tmp_path / "run", callbacks=[Worded()])
    sentence = r"callback Worded: .*metrics\['mood'\] must be a number, got 'good'"
    with pytest.raises(RunError, match=f"(?s){sentence}"):
        learner.step()
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [STEPS], "the others remain"


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_end"])
def test_an_error_of_a_callback_ends_the_run_with_its_name(tmp_path: Path, method: str) -> None:
    calls: list[Any] = []
    failing = Failing(method, KeyError("the disk of results"))
    both = [Noting(calls, "first"), failing, Noting(calls, "last")]
    learner = Learner(scheme_of(), STEPS, tmp_path / "run", callbacks=both)
    with pytest.raises(RunError, match=r"(?s)callback Failing: .*_raise.*the disk of results"):
        learner.step()
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is False
    assert ("first", "end", learner.steps) in calls
    assert (("last", "end", learner.steps) in calls) == (method != "on_start"), "if it had begun"
    if method != "on_start":
        saved = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")
        assert saved["stats"]["step"] == STEPS, "what was learnt is kept"
        assert [row["step"] for row in read_logs(tmp_path / "run")] == [STEPS]
    with pytest.raises(UsageError, match="the run has ended"):
        learner.step()


def test_a_usage_error_of_a_callback_passes_as_it_is(tmp_path: Path) -> None:
    failing = Failing("on_step", UsageError("install the package"))
    learner = Learner(scheme_of(), 100, tmp_path / "run", callbacks=[failing])
    with pytest.raises(UsageError, match="^install the package$"):
        learner.step()


def test_an_interrupt_in_a_callback_keeps_the_update_and_the_next_step_goes_on(
    tmp_path: Path,
) -> None:
    failing = Failing("on_step", KeyboardInterrupt())
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[failing]) as learner:
        with pytest.raises(KeyboardInterrupt):
            learner.step()
        assert learner.steps == STEPS
        assert learner.step()["step"] == 2 * STEPS
        assert [row["step"] for row in read_logs(tmp_path / "run")] == [STEPS, 2 * STEPS]


def test_an_interrupt_in_the_last_step_still_writes_the_checkpoint(tmp_path: Path) -> None:
    failing = Failing("on_step", KeyboardInterrupt())
    learner = Learner(scheme_of(), STEPS, tmp_path / "run", callbacks=[failing])
    with pytest.raises(KeyboardInterrupt):
        learner.step()
    assert learner.done()
    assert torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")["stats"]["step"] == STEPS


def test_an_interrupt_at_the_end_still_writes_the_checkpoint(tmp_path: Path) -> None:
    calls: list[Any] = []
    both = [Failing("on_end", KeyboardInterrupt()), Noting(calls)]
    learner = Learner(scheme_of(), STEPS, tmp_path / "run", callbacks=both)
    with pytest.raises(KeyboardInterrupt):
        learner.step()
    assert torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")["stats"]["step"] == STEPS
    assert calls[-1] == ("Noting", "end", STEPS)


def test_an_interrupt_while_threads_are_awaited_still_writes_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    learner = Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[Noting(calls)])
    learner.step()
    monkeypatch.setattr(Supervisor, "join", Mock(side_effect=[KeyboardInterrupt, []]))
    with pytest.raises(KeyboardInterrupt):
        learner.close()
    assert torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")["stats"]["step"] == STEPS
    assert calls[-1] == ("Noting", "end", STEPS)


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(scheme_of(), 10**6, tmp_path / "run")
    learner.step()
    monkeypatch.setattr(checkpoints, "write_newest", no_room)
    with pytest.raises(RunError, match="no checkpoint was written to .*No space left"):
        learner.close()


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


# --- state


def test_the_state_of_a_callback_may_have_a_number_of_numpy(tmp_path: Path) -> None:
    callbacks = [Remembering(np.float64(0.5))]
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=callbacks) as learner:
        learner.step()
    again = Remembering()
    Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[again]).close()
    assert again.count == 0.5


def test_the_state_of_a_callback_is_resumed_and_restored(tmp_path: Path) -> None:
    first = Remembering()
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[first]) as learner:
        learner.step()
        kept = learner.save_model(tmp_path / "kept.tar")
        learner.train(3 * STEPS)
    assert first.count == 3
    second = Remembering()
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[second]) as learner:
        assert second.count == 3
        learner.restore(kept)
        assert second.count == 1


def test_a_run_goes_on_with_other_callbacks(tmp_path: Path) -> None:
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[Remembering()]) as learner:
        learner.step()
    with Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=[Noting([])]) as learner:
        assert learner.step()["of_Noting"] == 2


def test_a_state_that_no_checkpoint_could_be_loaded_with_is_refused(tmp_path: Path) -> None:
    callbacks = [Remembering(Path("/"))]
    with Learner(scheme_of(), 10**6, tmp_path / "run") as learner:
        learner.step()
    learner = Learner(scheme_of(), 10**6, tmp_path / "run", callbacks=callbacks)
    callbacks[0].count = Path("/")
    learner.step()
    with pytest.raises(UsageError, match="state_dict of callback Remembering may contain only"):
        learner.close()
    assert torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")["stats"]["step"] == STEPS


# --- evaluation


class Scored(Learner):
    """Evaluations have these mean returns, one after the other."""

    scores: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()

    def evaluate(
        self, num_episodes: int = 10, *, sampled: bool = False, seed: int | None = None
    ) -> Episodes:
        assert seed is not None
        self.seeds += (seed,)
        score, *left = self.scores
        self.scores = tuple(left)
        return Episodes([score - 1, score + 1], [3, 5], [0, 0])


def scored(path: Path, scores: tuple[float, ...], every: int = STEPS, **how: Any) -> Scored:
    learner = Scored(scheme_of(), 10**6, path, callbacks=[Evaluation(every, **how)])
    learner.scores = scores
    return learner


def best_step(path: Path, name: str = "evaluation_best.tar") -> int:
    step: int = torchbeast.load_checkpoint(path / name)["stats"]["step"]
    return step


def test_the_checkpoint_of_the_best_evaluation_is_kept(tmp_path: Path) -> None:
    learner = scored(tmp_path, (1.0, 3.0, 2.0, 3.0))
    learner.train(4 * STEPS)
    learner.close()
    assert best_step(tmp_path) == 2 * STEPS
    rows = list(read_logs(tmp_path))
    assert [row["evaluation_mean_return"] for row in rows] == [1.0, 3.0, 2.0, 3.0]
    assert [row["evaluation_mean_length"] for row in rows] == [4.0] * 4
    assert len(set(learner.seeds)) == 4


def test_the_best_score_is_remembered_when_a_run_is_resumed(tmp_path: Path) -> None:
    with scored(tmp_path, (5.0,)) as learner:
        learner.step()
    with scored(tmp_path, (4.0, 6.0)) as learner:
        learner.step()
        assert best_step(tmp_path) == STEPS
        learner.step()
    assert best_step(tmp_path) == 3 * STEPS


def test_a_better_checkpoint_of_a_run_that_was_killed_is_not_overwritten(tmp_path: Path) -> None:
    with scored(tmp_path, (5.0,)) as learner:
        learner.step()
    (tmp_path / "model.tar").unlink()  # as if it had never been written
    (tmp_path / "logs.csv").unlink()  # the run is begun anew
    with scored(tmp_path, (4.0,)) as learner:
        learner.step()
    kept = torchbeast.load_checkpoint(tmp_path / "evaluation_best.tar")
    assert kept["callbacks"]["evaluation"]["best"] == 5.0


def test_a_best_checkpoint_that_cannot_be_written_is_a_warning_and_no_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scored(tmp_path, (5.0, 4.0)) as learner:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "save", no_room)
            learner.step()
        assert "No space left on device" in capsys.readouterr().err
        learner.step()
    assert best_step(tmp_path) == 2 * STEPS


def test_an_evaluation_that_the_end_of_a_run_interrupts_is_due_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    class Interrupted(Scored):
        def evaluate(self, *_: Any, **__: Any) -> Episodes:
            raise KeyboardInterrupt

    callbacks = [Evaluation(2 * STEPS)]
    with Interrupted(scheme_of(), 10**6, tmp_path, callbacks=callbacks) as learner:
        with pytest.raises(KeyboardInterrupt):
            learner.train(2 * STEPS)
    with scored(tmp_path, (1.0, 2.0), every=2 * STEPS) as learner:
        learner.train(4 * STEPS)
    steps = [row["step"] for row in read_logs(tmp_path / "evaluations.csv")]
    assert steps == [3 * STEPS, 4 * STEPS]


def test_a_last_evaluation_that_is_interrupted_is_made_up_for_once(tmp_path: Path) -> None:
    class Interrupted(Scored):
        def evaluate(self, *_: Any, **__: Any) -> Episodes:
            raise KeyboardInterrupt

    class OfOne(Scored):
        scores = (1.0,)

    def evaluated(kind: type[Learner]) -> Learner:
        return kind(scheme_of(), 2 * STEPS, tmp_path, callbacks=[Evaluation(2 * STEPS)])

    with pytest.raises(KeyboardInterrupt):
        evaluated(Interrupted).train()
    for _ in range(2):
        assert evaluated(OfOne).done()
    assert [row["step"] for row in read_logs(tmp_path / "evaluations.csv")] == [2 * STEPS]
    assert best_step(tmp_path) == 2 * STEPS


def test_evaluations_come_at_multiples_of_steps_and_after_the_last(tmp_path: Path) -> None:
    learner = Scored(
        scheme_of(), 5 * STEPS, tmp_path, callbacks=[Evaluation(2 * STEPS + 1, name="played")]
    )
    learner.scores = (1.0, 2.0, 3.0)
    learner.train()
    steps = [row["step"] for row in read_logs(tmp_path) if "played_mean_return" in row]
    assert steps == [3 * STEPS, 5 * STEPS]
    assert best_step(tmp_path, "played_best.tar") == 5 * STEPS


def seeding(num_envs: int) -> Catch:
    torch.manual_seed(0)
    return Catch(num_envs)


@pytest.mark.parametrize("envs", [{}, {"env_fn": seeding, "vec_env_size": 2}])
def test_an_evaluation_plays_the_weights_of_its_update_and_leaves_training_alone(
    tmp_path: Path, envs: dict[str, Any]
) -> None:
    how = {"envs": envs} if envs else {}

    def run(path: Path, *callbacks: Callback) -> Any:
        with Learner(scheme_of(**how), 10**6, path, seed=1, callbacks=callbacks) as learner:
            learner.train(3 * STEPS)
            weights = {name: value.clone() for name, value in learner.actor.state_dict().items()}
        return weights

    alone = run(tmp_path / "alone")
    evaluation = Evaluation(STEPS, num_episodes=3, sampled=True)
    beside = run(tmp_path / "beside", evaluation)
    assert all(torch.equal(alone[name], tensor) for name, tensor in beside.items())
    rows = list(read_logs(tmp_path / "beside"))
    assert len(rows) == 3 and all(-1 <= row["evaluation_mean_return"] <= 1 for row in rows)
    assert all(row["evaluation_mean_length"] == 9 for row in rows), "as in Catch"


def test_a_run_goes_on_from_the_best_checkpoint(tmp_path: Path) -> None:
    with scored(tmp_path / "run", (5.0, 4.0)) as learner:
        learner.train(2 * STEPS)
        learner.restore(tmp_path / "run" / "evaluation_best.tar")
        assert learner.steps == STEPS


# --- checkpoints


def test_checkpoints_are_kept_under_the_number_of_their_steps(tmp_path: Path) -> None:
    callbacks = [Checkpoints(2 * STEPS)]
    with Learner(scheme_of(), 10**6, tmp_path, callbacks=callbacks) as learner:
        learner.train(5 * STEPS)
        assert torchbeast.load_checkpoint(tmp_path / "model.tar")["stats"]["step"] == 4 * STEPS
    kept = {int(path.stem): path for path in (tmp_path / "checkpoints").iterdir()}
    assert sorted(kept) == [2 * STEPS, 4 * STEPS]
    for step, path in kept.items():
        assert torchbeast.load_checkpoint(path)["stats"]["step"] == step


def test_old_checkpoints_are_removed_and_files_of_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine.tar").touch()
    callbacks = [Checkpoints(STEPS, keep=2)]
    with Learner(scheme_of(), 4 * STEPS, tmp_path, callbacks=callbacks) as learner:
        learner.train()
    names = {path.stem.lstrip("0") for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"60", "80", "mine"}


def test_copies_of_a_run_that_went_back_are_kept_beside_later_ones(tmp_path: Path) -> None:
    callbacks = [Checkpoints(STEPS, keep=2)]
    with Learner(scheme_of(), 10**6, tmp_path, callbacks=callbacks) as learner:
        learner.step()
        learner.save_model(tmp_path / "first.tar")
        learner.train(4 * STEPS)
        learner.restore(tmp_path / "first.tar")
        learner.step()
    names = {path.stem.lstrip("0") for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"40", "60", "80"} and learner.steps == 2 * STEPS


def test_without_copies_only_the_runs_own_checkpoint_is_written(tmp_path: Path) -> None:
    with Learner(scheme_of(), 10**6, tmp_path, callbacks=[Checkpoints(STEPS, keep=0)]) as learner:
        learner.step()
        assert torchbeast.load_checkpoint(tmp_path / "model.tar")["stats"]["step"] == STEPS
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_disk_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Learner(scheme_of(), 10**6, tmp_path, callbacks=[Checkpoints(STEPS)]) as learner:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "write_newest", no_room)
            learner.step()
        assert "No space left on device" in capsys.readouterr().err
        learner.step()
        assert best_step(tmp_path, "model.tar") == 2 * STEPS


# --- schedules


class Acting(builtin_callbacks._Periodic):
    """Notes the steps at which it acts."""

    def __init__(self, every_steps: int | None = None, every_seconds: float | None = None) -> None:
        super().__init__(every_steps, every_seconds)
        self.acted: list[int] = []

    def _act(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        self.acted.append(learner.steps)


class AtStep:
    """A Learner that trains for long."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def done(self) -> bool:
        return False


def acted_at(callback: Acting, start: int, steps: Sequence[int]) -> list[int]:
    learner: Any = AtStep(start)
    callback.on_start(learner)
    for learner.steps in steps:
        callback.on_step(learner, {})
    return callback.acted


def test_a_schedule_of_seconds_counts_from_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.9, 15.0, 15.0, 16.0, 20.0, 20.0])
    monkeypatch.setattr(builtin_callbacks, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert acted_at(Acting(every_seconds=5.0), 0, [1, 2, 3, 4]) == [2, 4]


def test_a_schedule_begins_at_0_for_a_subclass_with_a_start_of_its_own() -> None:
    class Own(Acting):
        def on_start(self, learner: RunningLearner) -> None:
            pass

    assert acted_at(Own(100), 0, [99, 100]) == [100]


def test_a_schedule_of_steps_is_due_once_for_each_multiple() -> None:
    resumed = 150
    assert acted_at(Acting(100), resumed, [199, 200, 210, 450, 500]) == [200, 450, 500]


@pytest.mark.parametrize(
    ("steps", "seconds", "said"),
    [
        (None, None, "either every_steps or every_seconds"),
        (10, 5.0, "either every_steps or every_seconds"),
        (0, None, "every_steps must be greater than 0"),
        (None, -1.0, "every_seconds must be greater than 0"),
    ],
)
def test_a_schedule_needs_one_period(steps: int | None, seconds: float | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Evaluation(steps, every_seconds=seconds)


def test_a_run_from_another_ones_checkpoint_keeps_a_best_of_its_own(tmp_path: Path) -> None:
    with scored(tmp_path / "a", (5.0,)) as learner:
        learner.step()
        kept = learner.save_model(tmp_path / "kept.tar")
    with scored(tmp_path / "b", (4.0,)) as learner:
        learner.restore(kept)
        learner.step()
    assert best_step(tmp_path / "b") == 2 * STEPS


@pytest.mark.parametrize("keep_best", [True, False])
def test_an_evaluation_that_is_used_for_a_second_run_begins_anew(
    tmp_path: Path, keep_best: bool
) -> None:
    evaluation = Evaluation(STEPS, keep_best=keep_best)
    for name, score in (("a", 5.0), ("b", 4.0)):
        learner = Scored(scheme_of(), 10**6, tmp_path / name, callbacks=[evaluation])
        learner.scores = (score,)
        learner.step()
        learner.close()
        assert evaluation.best == score
        assert not keep_best or best_step(tmp_path / name) == STEPS
