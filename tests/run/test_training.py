# SPDX-License-Identifier: Apache-2.0
"""The training loop with a fake source: counters, publication, logs, consistent checkpoints."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from background import Background
from learners import impala

from torchbeast.collect.contract import LostStream
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.base import Counters
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.computing import CudaStream
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.diagnosis import spent
from torchbeast.reporting.display import Progress
from torchbeast.reporting.log_files import LogFiles, read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run import training as training_module
from torchbeast.run.assemble import Assembled, choose
from torchbeast.run.checkpoint_writer import CheckpointWriter
from torchbeast.run.config import CheckpointConfig, HardwareConfig
from torchbeast.run.training import DONE, LearnerClock, LearnerThread, Rows, Training

T, B = 5, 2
SOON = 20.0


def rollout(reward: float = 1.0) -> Rollout:
    """Returns a rollout in which one episode ends: row 2, column 0, return 7, 4 steps."""
    done = torch.zeros(T + 1, B, dtype=torch.bool)
    done[2, 0] = True
    return Rollout(
        observation=torch.randn(T + 1, B, 4),
        reward=torch.full((T + 1, B), reward),
        done=done,
        episode_step=torch.full((T + 1, B), 4, dtype=torch.int32),
        episode_return=torch.full((T + 1, B), 7.0),
        action=torch.randint(3, (T + 1, B)),
        extras={"policy_logits": torch.zeros(T + 1, B, 3)},
        initial_agent_state=(),
        truncated=torch.zeros(T + 1, B, dtype=torch.bool),
        episode_end=done,
        policy_version=torch.zeros(T + 1, B, dtype=torch.int64),
        final_observation=torch.zeros(0, 4),
        env_index=torch.arange(B).expand(T + 1, B),
        rollout_index=torch.zeros(T + 1, B, dtype=torch.int64),
    )


class ListSource:
    """A source that yields each of these batches once, to any thread."""

    yields: type = Rollout

    def __init__(self, batches: Sequence[Any]) -> None:
        self._given = 0
        self._batches = iter(batches)
        self._lock = threading.Lock()

    def batches(self) -> Iterator[Any]:
        while True:
            with self._lock:
                batch = next(self._batches, None)
            if batch is None:
                return
            self._given += 1
            yield batch

    num_bytes = 0

    def status(self) -> dict[str, int]:
        return {"learner_queue_size": 0}

    def hanging(self) -> str:
        return ""

    def lost_streams(self) -> list[LostStream]:
        return []

    def seconds(self) -> dict[str, float]:
        """Returns three seconds for each batch."""
        return {"environment": 2.0 * self._given, "inference": 1.0 * self._given, "queueing": 0.0}


def learner_of(agent: Agent, step: OptimiserStep[Any], weights: PublishedWeights) -> Assembled:
    """Returns these parts as a learner on the CPU."""
    return Assembled(
        compute=choose(HardwareConfig(device="cpu")),
        agent=agent,
        optimiser_step=step,
        weights=weights,
    )


def ignore(step: int, row: dict[str, float]) -> None:
    """Does nothing with a row."""


class Run:
    """A training loop over the given batches."""

    def __init__(
        self,
        folder: Path,
        batches: list[Rollout],
        total_steps: int,
        use_lstm: bool = False,
        **kwargs: Any,
    ) -> None:
        spec = ActorSpec("mlp", use_lstm=use_lstm)
        agent = make_agent(spec, ArraySpec((4,), "float32"), Discrete(3), 1)
        self.model = agent.model
        self.step = impala(self.model, total_steps=total_steps)
        self.weights = PublishedWeights(self.model)
        self.supervisor = Supervisor()
        self.files = LogFiles(folder)
        of_run: Any = SimpleNamespace(path=folder, checkpoint=folder / "model.tar")
        self.parts: dict[str, Any] = dict(
            source=ListSource(batches),
            made=learner_of(agent, self.step, self.weights),
            supervisor=self.supervisor,
            writer=CheckpointWriter(of_run, {}, CheckpointConfig()),
        )
        self.training = self.made(total_steps=total_steps, **kwargs)

    def made(self, total_steps: int, stops_at: Any = (), **more: Any) -> Training:
        parts = self.parts | more
        return Training(
            **parts,
            rows=Rows(parts["source"], self.files, Progress(), ()),
            stops_at={DONE: total_steps, **dict(stops_at)},
        )

    def learn(self, num_threads: int = 1) -> None:
        self.training.start(num_threads, ignore)
        assert self.supervisor.join(SOON) == []
        self.files.close()


def test_a_row_that_is_written_slowly_is_waited_for_and_not_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "_WRITING_S", 0.0)
    seen: list[tuple[str, float]] = []

    class SlowLog:
        def write(self, *_: object) -> None:
            began, now = run.training.rows.reading(), run.training.rows.reading()
            seen.append((run.training.waits_for_files(), spent(now, began)["learning"]))
            assert now.writing > began.writing

    run = Run(tmp_path, [rollout()], total_steps=1)
    run.training.rows.log = SlowLog()  # type: ignore[assignment]
    run.learn()
    assert seen == [(f"the learner waits for files in {tmp_path}", 0.0)]
    assert run.training.waits_for_files() == ""


def test_training_ends_at_the_first_update_that_reaches_total_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(9)], total_steps=3 * T * B - 1)
    run.learn()
    assert run.supervisor.reason == DONE
    assert run.training.progress.step == 3 * T * B and run.training.updates == 3


def test_a_run_pauses_at_the_first_update_that_reaches_pause_at(tmp_path: Path) -> None:
    batches = [rollout() for _ in range(9)]
    run = Run(tmp_path, batches, total_steps=8 * T * B, stops_at={"a pause": 2 * T * B + 1})
    run.learn()
    assert run.supervisor.reason == "a pause"
    assert run.training.progress.step == 3 * T * B


def test_many_learner_threads_learn_and_log_each_batch_once(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(20)], total_steps=20 * T * B)
    run.learn(num_threads=4)
    rows = list(read_logs(tmp_path))
    assert [row["step"] for row in rows] == [T * B * n for n in range(1, 21)]
    assert run.training.progress.episodes == 20


def test_logged_returns_are_those_of_the_episodes_that_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout()], total_steps=T * B)
    run.learn()
    (row,) = read_logs(tmp_path)
    assert (row["mean_episode_return"], row["mean_episode_length"], row["episodes"]) == (
        7.0,
        4.0,
        1,
    )
    assert {"total_loss", "learning_rate", "grad_norm", "learner_queue_size"} <= set(row)


def test_a_metric_of_an_algorithm_cannot_take_the_place_of_a_returns_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, [rollout()], total_steps=T * B)
    wrong = {"mean_return": torch.tensor(-77.0)}
    monkeypatch.setattr(run.step.algo, "metrics", lambda _: wrong)
    run.learn()
    (row,) = read_logs(tmp_path)
    assert row["mean_return"] == 7.0


def test_each_row_has_the_seconds_since_the_row_before(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(4)], total_steps=4 * T * B)
    run.learn()
    rows = list(read_logs(tmp_path))
    assert len(rows) == 4
    for row in rows:
        times = [row[f"time_{name}"] for name in ("environment", "inference", "queueing")]
        assert times == [2.0, 1.0, 0.0]
        assert row["time_learning"] > 0 and row["time_waiting"] >= 0
        assert row["steps_per_second"] > 0 and row["mean_length"] > 0
    whole = run.training.rows.reading().seconds
    assert sum(row["time_environment"] for row in rows) == whole["environment"] == 8.0
    assert sum(row["time_learning"] for row in rows) <= whole["learning"]


def test_a_row_ends_with_learnt_steps_and_optimiser_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(2)], total_steps=2 * T * B)
    run.step.counters.learnt_steps = 100  # an earlier part of the run reused its steps
    run.learn()
    rows = [list(row.items())[-2:] for row in read_logs(tmp_path)]
    assert rows == [
        [("learnt_steps", 100 + T * B), ("optimiser_steps", 1)],
        [("learnt_steps", 100 + 2 * T * B), ("optimiser_steps", 2)],
    ]


def test_a_run_continues_a_log_that_lacks_the_newer_columns(tmp_path: Path) -> None:
    (tmp_path / "fields.csv").write_text("_tick,_time,step,total_loss\n")
    (tmp_path / "logs.csv").write_text("# _tick,_time,step,total_loss\n0,1.0,5,2.5\n")
    Run(tmp_path, [rollout()], total_steps=T * B).learn()
    before, after = read_logs(tmp_path)
    assert before == {"_tick": 0, "_time": 1, "step": 5, "total_loss": 2.5}
    assert (after["_tick"], after["learnt_steps"], after["optimiser_steps"]) == (1, T * B, 1)


def test_a_row_has_the_policy_lag_of_its_batch(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(3)], total_steps=3 * T * B)
    run.learn()
    assert [row["mean_lag"] for row in read_logs(tmp_path)] == [0.0, 1.0, 2.0]
    assert [row["max_lag"] for row in read_logs(tmp_path)] == [0.0, 1.0, 2.0]
    assert run.training.rows.newest["max_lag"] == 2.0
    assert run.training.progress.mean_length() == 4.0


def test_the_published_weights_are_the_newest_and_are_copies(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(2)], total_steps=2 * T * B)
    replica = make_agent(ActorSpec("mlp"), ArraySpec((4,), "float32"), Discrete(3), 1).model
    run.learn()
    assert run.weights.refresh(replica, None) == 2
    ours, theirs = run.model.state_dict(), replica.state_dict()
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        next(run.model.parameters()).fill_(1000.0)
    run.weights.refresh(replica, None)
    assert max(p.abs().max() for p in replica.parameters()) < 1000.0


def test_an_up_to_date_replica_is_not_loaded_again(tmp_path: Path) -> None:
    run = Run(tmp_path, [], total_steps=1)
    replica = make_agent(ActorSpec("mlp"), ArraySpec((4,), "float32"), Discrete(3), 1).model
    version = run.weights.refresh(replica, None)
    with torch.no_grad():
        next(replica.parameters()).fill_(5.0)
    assert run.weights.refresh(replica, version) == version
    assert next(replica.parameters()).eq(5.0).all()


def test_nan_ends_the_run_names_the_tensor_and_keeps_the_weights(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout(), rollout(reward=float("nan")), rollout()], total_steps=1000)
    run.learn()
    assert run.supervisor.failure is not None
    assert isinstance(run.supervisor.failure.error, NonFiniteError)
    assert "loss is nan" in str(run.supervisor.failure.error)
    assert run.training.updates == 1
    assert all(p.isfinite().all() for p in run.model.parameters())


def states_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(states_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def test_the_state_saved_at_a_nan_is_that_after_the_last_good_update(tmp_path: Path) -> None:
    """Compares weights, optimiser, schedule, counters and random generator."""
    for name, batches in (("good", [1.0, 2.0]), ("bad", [1.0, 2.0, float("nan")])):
        (tmp_path / name).mkdir()
        torch.manual_seed(0)
        rollouts = [rollout(reward) for reward in batches]
        torch.manual_seed(1)
        run = Run(tmp_path / name, rollouts, 1000)
        run.learn()
        if name == "good":
            good = run.training.checkpoint()
    path = tmp_path / "bad" / "last_good.tar"
    kept = checkpoints.load(path, needed=())
    assert states_equal(good, kept)
    assert kept["scheduler_state_dict"]["version"] == 2
    assert run.supervisor.failure is not None
    said = f"The previous state is in {path}; the checkpoint is unchanged"
    assert str(run.supervisor.failure.error).endswith(said)


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout(), rollout()], total_steps=1000)
    name, parameter = list(run.model.named_parameters())[-1]
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    run.learn()
    assert run.supervisor.failure is not None and run.training.updates == 0
    assert f"the gradient of actor.{name} is not finite" in str(run.supervisor.failure)


def test_a_state_that_is_not_finite_is_not_saved_as_good(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout(reward=float("nan"))], total_steps=1000)
    run.model.register_buffer("running_mean", torch.full((3,), float("nan")))
    run.learn()
    assert "model.running_mean was already not finite" in str(run.supervisor.failure)
    assert not (tmp_path / "last_good.tar").exists()


def test_a_full_disk_does_not_hide_the_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(checkpoints, "save", Mock(side_effect=full))
    run = Run(tmp_path, [rollout(reward=float("nan"))], total_steps=1000)
    run.learn()
    assert "loss is nan" in str(run.supervisor.failure)
    assert "could not be saved: [Errno 28] No space left" in str(run.supervisor.failure)


def test_a_failing_learner_thread_does_not_block_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout(reward=float("nan"))] + [rollout()] * 20, total_steps=10_000)
    run.learn(num_threads=4)
    assert run.supervisor.failure is not None


def test_a_checkpoint_is_a_consistent_copy_between_two_updates(tmp_path: Path) -> None:
    """Checkpoints taken during learning hold the weights of exactly the version that they name."""
    run = Run(tmp_path, [rollout() for _ in range(60)], total_steps=60 * T * B)
    weights_of = {0: copy.deepcopy(run.model.state_dict())}
    publish = run.weights.publish

    def record(model: torch.nn.Module, version: int) -> None:
        publish(model, version)
        weights_of[version] = copy.deepcopy(model.state_dict())

    run.weights.publish = record  # type: ignore[method-assign]
    run.training.start(1, ignore)
    found = []
    while not run.supervisor.ended:
        found.append(run.training.checkpoint())
    found.append(run.training.checkpoint())
    assert run.supervisor.join(SOON) == []
    for saved in found:
        version = saved["scheduler_state_dict"]["version"]
        assert saved["stats"]["step"] == version * T * B
        expected = weights_of[version]
        assert all(torch.equal(expected[k], v) for k, v in saved["model_state_dict"].items())


def test_a_checkpoint_does_not_change_while_learning_continues(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout()], total_steps=T * B)
    before = run.training.checkpoint()
    kept = {k: v.clone() for k, v in before["model_state_dict"].items()}
    run.learn()
    assert all(torch.equal(kept[k], v) for k, v in before["model_state_dict"].items())
    after = run.model.state_dict()
    assert any(not torch.equal(kept[k], after[k]) for k in kept), "something was learnt"


def test_the_last_checkpoint_waits_for_an_update_as_long_as_twice_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter wait in the middle of an update finds no moment, and loses nothing."""
    run = Run(tmp_path, [rollout() for _ in range(3)], total_steps=3 * T * B)
    seconds, now = [1.0, 500.0, 2.0], 0.0
    run.training.rows.clock = LearnerClock(lambda: now)
    begun, go_on = threading.Event(), threading.Event()
    update = run.step.update

    def slow(batch: Rollout) -> dict[str, float]:
        nonlocal now
        now += seconds[run.step.version]
        if run.step.version == 2:
            begun.set()
            assert go_on.wait(SOON)
        return update(batch)

    run.step.update = slow  # type: ignore[method-assign]
    assert run.training.patience_s == 120.0
    run.training.start(1, ignore)
    assert begun.wait(SOON)
    assert run.training.patience_s == 1000.0
    with monkeypatch.context() as patch:
        patch.setattr(Training, "patience_s", 0.0)
        with pytest.raises(RunError, match="an update had not ended after 0 s; progress since"):
            run.training.checkpoint()
    waiting = Background(run.training.checkpoint)
    go_on.set()
    assert waiting.result()["scheduler_state_dict"]["version"] == 3
    assert run.supervisor.join(SOON) == [] and run.supervisor.failure is None


def test_the_profiler_writes_a_trace_of_one_update(tmp_path: Path) -> None:
    batches = [rollout() for _ in range(6)]
    run = Run(tmp_path, batches, total_steps=6 * T * B, trace=tmp_path / "trace.json")
    run.learn()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_resumed_run_traces_the_fifth_update_of_its_own_process(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(6)], total_steps=1000)
    run.step.counters.version = 100
    traced = []
    run.training = run.made(total_steps=60 * T * B, trace=tmp_path / "trace.json")
    update = run.step.update

    def note(batch: Rollout) -> dict[str, float]:
        traced.append(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
        return update(batch)

    run.step.update = note  # type: ignore[method-assign]
    run.learn()
    assert traced == [False] * 4 + [True, False]


def test_progress_survives_a_checkpoint() -> None:
    progress = Progress(step=10, episodes=3)
    progress.returns.extend([1.0, 2.0])
    progress.lengths.extend([5, 8])
    other = Progress()
    other.load_state_dict(progress.state_dict())
    assert other.state_dict() == progress.state_dict() and other.mean_return() == 1.5
    assert other.mean_length() == 6.5


@pytest.mark.parametrize("stats", [{}, {"step": 5, "mean_episode_return": 1.0}])
def test_stats_with_missing_and_unknown_entries_are_read(stats: dict[str, Any]) -> None:
    progress = Progress()
    progress.load_state_dict(stats)
    assert progress.step == stats.get("step", 0)


@pytest.mark.parametrize("device", ["shared", "elsewhere"])
def test_a_source_is_given_the_feedback_of_every_update_before_it_is_asked_for_another_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Also where the learner has a copy of the batch, as on a GPU."""
    if device == "elsewhere":
        monkeypatch.setattr(CudaStream, "to_device", lambda self, leaf: leaf.clone())
    run = Run(tmp_path, [], total_steps=9 * T * B, use_lstm=True)
    given: list[tuple[str, Feedback]] = []
    state = run.model.initial_state(B)
    batches = [
        replace(
            rollout(),
            initial_agent_state=state,
            feeds_back=True,
            give_feedback=lambda feedback, name=name: given.append((name, feedback)),
        )
        for name in ("first", "second")
    ]
    expected = unroll(run.model, batches[0]).final_state  # of the weights before the first update
    run.training = run.made(total_steps=9 * T * B, source=ListSource(batches))
    run.learn()
    assert [name for name, _ in given] == ["first", "second"]
    torch.testing.assert_close(given[0][1].final_state, expected)


# --- the consumers of rows


def test_consumers_get_a_row_once_it_is_in_the_log(tmp_path: Path) -> None:
    """So that a checkpoint is never newer than the log, even if the process is killed."""
    run = Run(tmp_path, [rollout(), rollout()], total_steps=2 * T * B)
    logged: list[list[float]] = []

    def consume(step: int, row: dict[str, float]) -> None:
        assert not run.supervisor.ended and row["learnt_steps"] == step
        logged.append([row["step"] for row in read_logs(tmp_path)])

    run.training.consumers = [consume]
    run.learn()
    assert logged == [[T * B], [T * B, 2 * T * B]]


def test_the_row_of_a_failing_callback_is_logged_and_the_run_fails(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout(), rollout()], total_steps=2 * T * B)

    def callbacks(step: int, row: dict[str, float]) -> None:
        row["mine"] = 5.0
        raise StopIteration  # even this one does not look like the end of the batches

    run.training.start(1, callbacks)
    assert run.supervisor.join(SOON) == []
    run.files.close()
    assert run.supervisor.failure is not None
    assert [(row["step"], row["mine"]) for row in read_logs(tmp_path)] == [(T * B, 5.0)]


def test_an_interrupted_update_is_dropped_and_its_version_is_published(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(3)], total_steps=1000)
    update, thread = run.step.update, LearnerThread(run.training)
    source: Any = run.training.source
    source.batches = Mock(wraps=source.batches)

    def interrupted(batch: Rollout) -> Any:
        raise KeyboardInterrupt

    assert thread.step(ignore) is not None
    run.step.update = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        thread.step(ignore)
    assert run.weights.version == 2 and run.training.rows.count == 1
    run.step.update = update  # type: ignore[method-assign]
    row = thread.step(ignore)
    assert row is not None and row["max_lag"] == 2.0
    assert source.batches.call_count == 2, "the source does not count the dropped batch"


def test_a_batch_is_dropped_if_an_interrupt_comes_before_its_update(tmp_path: Path) -> None:
    run = Run(tmp_path, [rollout() for _ in range(3)], total_steps=1000)
    lock, thread = run.training.lock, LearnerThread(run.training)
    source: Any = run.training.source
    source.batches = Mock(wraps=source.batches)
    assert thread.step(ignore) is not None
    run.training.lock = MagicMock(__enter__=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        thread.step(ignore)
    run.training.lock = lock
    assert thread.step(ignore) is not None
    assert run.weights.version == 3, "workers with a fixed lag wait for that of the dropped batch"
    assert source.batches.call_count == 2, "the source does not count the dropped batch"


def test_infinite_numbers_in_an_info_count_for_nothing() -> None:
    """A ratio may have none, and a host may send any."""
    ended = torch.zeros(T + 1, B, dtype=torch.bool)
    ended[2] = True
    numbers = torch.tensor([math.inf, -math.inf]).expand(T + 1, B)
    batch = replace(rollout(), done=ended, episode_end=ended, info={"ratio": numbers})
    rows = Rows(ListSource([]), Mock(), Progress(), ("ratio",))
    assert math.isnan(rows.make(batch, {}, Counters())["info_ratio"])
