# SPDX-License-Identifier: Apache-2.0
"""--mode test --follow evaluates every checkpoint of a run once, keeps the best, and ends with it.

Mean returns are chosen: the evaluation of a checkpoint returns what its weights are filled with.
What happens while a follower waits is a list of events, one for each time that it waits.
"""

from __future__ import annotations

import errno
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import torchbeast
from torchbeast import envs, monobeast
from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.evaluation import following
from torchbeast.evaluation import play as play_module
from torchbeast.evaluation.following import RunFollower, RunWatch
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.plot import curve
from torchbeast.reporting.log_files import AppendedFile, read_logs
from torchbeast.reporting.run_folder import RunFolder
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import EvaluationConfig
from torchbeast.run.episodes import Episodes, play
from torchbeast.run.periodic import Scores

Event = Callable[[], object]
TOTAL = 1000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has begun."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def chosen_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_module, "play", as_filled)


def as_filled(_: Any, agent: Any, num_episodes: int, seed: int, *__: Any, **___: Any) -> Episodes:
    value = next(agent.model.parameters()).flatten()[0].item()
    return Episodes([value - 1, value + 1], [3, 5], [0, 1])


_clock = iter(range(1_700_000_000, 1_800_000_000))


def save(folder: Path, step: int, score: float, total: int = TOTAL, **more: Any) -> None:
    """Writes a checkpoint, each a second after the one before.

    more: further entries; None leaves one out.
    """
    env = envs.make("Catch", 1)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, env.frame_stack)
    for parameter in agent.model.parameters():
        parameter.data.fill_(score)
    saved = {key: {} for key in checkpoints.KEYS} | {
        "model_state_dict": agent.model.state_dict(),
        "flags": {"env": "Catch", "total_steps": total, "algo": "ppo", "use_lstm": False},
        "stats": {"step": step},
        "format": 1,
        "model": "mlp",
    }
    path = folder / "model.tar"
    checkpoints.save(
        path, {key: value for key, value in (saved | more).items() if value is not None}
    )
    written = next(_clock)
    os.utime(path, (written, written))


class Watched(RunWatch):
    """A run that goes on until an event ends it."""

    is_running = True
    has_stopped = False

    def __init__(self) -> None:
        super().__init__(Path())

    def leave(self) -> None:
        """The process of the run ends."""
        self.is_running = False

    def stop(self) -> None:
        """The process of the run ended a while ago."""
        self.is_running, self.has_stopped = False, True


class Waiting(Supervisor):
    """Waits for events instead of time."""

    def __init__(self, events: Iterator[Event]) -> None:
        super().__init__()
        self._events = events

    def wait(self, timeout: float) -> bool:
        if timeout > 0:
            next(self._events)()
        return super().wait(0)


def follow(
    folder: Path, *events: Event, watch: RunWatch | None = None, **config: Any
) -> list[dict[str, float]]:
    """Follows a run through the events; returns the rows that were written then."""
    with ExitStack() as ending:
        RunFollower(
            folder,
            EvaluationConfig(**config),
            EnvSpec(""),
            0,
            Waiting(iter(events)),
            ending,
            watch=watch or stopped(),
        ).run()
    return rows(folder)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> None:
        raise error

    return call


def stopped() -> Watched:
    watch = Watched()
    watch.stop()
    return watch


def rows(folder: Path) -> list[dict[str, float]]:
    return list(read_logs(folder / "evaluations.csv"))


def steps(folder: Path) -> list[float]:
    return [row["step"] for row in rows(folder)]


def kept(folder: Path) -> tuple[int, float]:
    """The step of the best checkpoint, and its score."""
    found = torchbeast.load_checkpoint(folder / "evaluation_best.tar")
    return found["stats"]["step"], found["callbacks"]["evaluation"]["best"]


def test_every_new_checkpoint_gets_a_row_and_the_best_is_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watched()
    save(run, 100, 2.0)
    follow(
        run,
        lambda: save(run, 300, 5.0),
        lambda: None,
        lambda: (save(run, 1000, 4.0), watch.leave()),
        watch=watch,
    )
    found = rows(run)
    assert [row["step"] for row in found] == [100, 300, 1000]
    assert [row["mean_episode_return"] for row in found] == [2.0, 5.0, 4.0]
    assert {(row["max_return"] - row["min_return"]) for row in found} == {2.0}
    assert {row["mean_episode_length"] for row in found} == {4.0}
    assert {(row["num_episodes"], row["distinct_episodes"]) for row in found} == {(2.0, 2.0)}
    assert kept(run) == (300, 5.0)
    said = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in said if "mean return" in line] == [
        "Step 100:",
        "Step 300:",
        "Step 1,00",
    ]
    assert sum("new best" in line for line in said) == 2
    assert said[-1] == "The run is complete (1,000 steps)."


def test_a_restart_plays_nothing_again_and_keeps_the_better_one(run: Path) -> None:
    save(run, 100, 5.0)
    follow(run)
    follow(run)
    assert steps(run) == [100]
    save(run, 200, 4.0)
    follow(run)
    assert steps(run) == [100, 200] and kept(run) == (100, 5.0)
    save(run, 300, 6.0)
    follow(run)
    assert kept(run) == (300, 6.0)


def test_a_restart_after_the_end_of_the_run_ends_at_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left to evaluate, and the process of the run is gone."""
    watch = Watched()
    watch.leave()
    save(run, 1000, 5.0)
    follow(run, watch=watch)
    capsys.readouterr()
    follow(run, watch=watch)
    assert steps(run) == [1000]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Step 1,000 was already evaluated.",
        "The run is complete (1,000 steps).",
    ]


def test_the_best_of_a_learner_is_replaced_by_a_better_one_only(run: Path) -> None:
    """Its Evaluation callback has the same file, and the same entry."""
    save(run, 100, 0.0, callbacks={"evaluation": {"best": 5.0}})
    (run / "model.tar").rename(run / "evaluation_best.tar")
    save(run, 200, 4.0, callbacks={"mine": {"a": 1}, "evaluation": {"best": 5.0}})
    follow(run)
    assert kept(run) == (100, 5.0)
    save(run, 300, 6.0, callbacks={"mine": {"a": 1}, "evaluation": {"best": 5.0}})
    follow(run)
    assert kept(run) == (300, 6.0)
    others = torchbeast.load_checkpoint(run / "evaluation_best.tar")["callbacks"]["mine"]
    assert others == {"a": 1}


def test_no_score_is_better_than_none(run: Path) -> None:
    save(run, 100, math.nan)
    follow(run)
    assert steps(run) == [100] and not (run / "evaluation_best.tar").exists()


def test_a_run_that_goes_on_with_more_steps_is_followed(run: Path) -> None:
    """Its process runs when the steps that it first had are learnt."""
    watch = Watched()
    save(run, 1000, 1.0)
    follow(
        run, lambda: None, lambda: (save(run, 2000, 2.0, total=2000), watch.leave()), watch=watch
    )
    assert steps(run) == [1000, 2000]


def test_a_checkpoint_that_is_written_at_the_very_end_is_evaluated(run: Path) -> None:
    class Ending(Watched):
        @property
        def has_stopped(self) -> bool:  # type: ignore[override]
            if not any(row["step"] == 600 for row in rows(run)):
                save(run, 600, 2.0)
            return True

    save(run, 500, 1.0)
    follow(run, watch=Ending())
    assert steps(run) == [500, 600]


def test_it_waits_for_the_first_checkpoint_and_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watched()
    folder = run / "later"
    follow(
        folder,
        lambda: None,
        folder.mkdir,
        lambda: (save(folder, 1000, 1.0), watch.leave()),
        watch=watch,
    )
    assert steps(folder) == [1000]
    path = folder / "model.tar"
    assert capsys.readouterr().out.startswith(f"Waiting for the first checkpoint, {path}.\n")


def test_a_run_that_stops_without_a_checkpoint_is_an_error(run: Path) -> None:
    with pytest.raises(RunError, match="stopped without a checkpoint"):
        follow(run, lambda: None)


def test_a_damaged_checkpoint_is_named_once_and_the_next_is_evaluated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watched()
    (run / "model.tar").write_bytes(b"damaged")
    follow(
        run, lambda: None, lambda: None, lambda: (save(run, 1000, 1.0), watch.leave()), watch=watch
    )
    assert steps(run) == [1000]
    said = capsys.readouterr().err
    assert said.count("is not a valid checkpoint") == 1 == said.count("\n")


def test_a_checkpoint_that_a_disk_fails_to_give_is_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watched()
    save(run, 1000, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "is_zipfile", raising(OSError(errno.EIO, "Input/output error")))
        follow(run, lambda: None, lambda: (patch.undo(), watch.leave()), watch=watch)
    assert steps(run) == [1000]


def test_checkpoints_that_are_replaced_while_they_are_read_are_evaluated_until_a_signal(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, supervisor = checkpoints.load, Waiting(iter(()))
    written = iter(range(200, 1000, 100))

    def replaced(path: Path, needed: Sequence[str]) -> dict[str, Any]:
        found = read(path, needed)
        if path.name == "evaluation_best.tar":
            return found
        save(run, next(written), 1.0)
        if found["stats"]["step"] == 300:
            supervisor.stop("a signal")
        return found

    save(run, 100, 1.0)
    monkeypatch.setattr(checkpoints, "load", replaced)
    with ExitStack() as ending:
        config = EvaluationConfig()
        RunFollower(run, config, EnvSpec(""), 0, supervisor, ending, watch=Watched()).run()
    assert steps(run) == [100, 200, 300]


def test_a_last_checkpoint_that_is_damaged_is_the_error_at_the_end(run: Path) -> None:
    watch = Watched()
    save(run, 500, 1.0)
    with pytest.raises(checkpoints.Damaged):
        follow(run, lambda: (run / "model.tar").write_bytes(b"damaged"), watch.stop, watch=watch)
    assert steps(run) == [500]


def test_weights_that_are_saved_again_are_not_evaluated_again(run: Path) -> None:
    """As by a run that stands still, and at its end."""
    watch = Watched()
    save(run, 1000, 1.0)
    follow(
        run, lambda: save(run, 1000, 1.0), lambda: save(run, 1000, 1.0), watch.leave, watch=watch
    )
    follow(run)
    assert steps(run) == [1000]


def test_other_weights_of_the_same_step_are_evaluated(run: Path) -> None:
    """As after a run that went back to an earlier checkpoint."""
    save(run, 1000, 1.0)
    follow(run)
    save(run, 1000, 2.0)
    follow(run)
    assert [row["mean_episode_return"] for row in rows(run)] == [1.0, 2.0]


def test_a_stop_in_the_midst_of_an_evaluation_leaves_no_row(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next follower evaluates the checkpoint."""
    supervisor = Waiting(iter(()))

    def interrupted(*args: Any, **how: Any) -> Episodes:
        supervisor.stop("a signal")
        return play(*args, **how)

    save(run, 1000, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(play_module, "play", interrupted)
        with pytest.raises(KeyboardInterrupt), ExitStack() as ending:
            config = EvaluationConfig()
            RunFollower(run, config, EnvSpec(""), 0, supervisor, ending, watch=stopped()).run()
    assert rows(run) == [] and not (run / "evaluation_best.tar").exists()
    follow(run)
    assert steps(run) == [1000]


def test_a_full_disk_costs_the_row_and_the_best_but_not_the_follower(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save(run, 100, 5.0)
    watch = Watched()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", no_room)
        patch.setattr(AppendedFile, "append", no_room)

        def freed() -> None:
            patch.undo()
            save(run, 1000, 4.0)
            watch.leave()

        follow(run, freed, watch=watch)
    assert steps(run) == [1000] and kept(run) == (1000, 4.0)
    assert capsys.readouterr().err.count("No space left on device") == 2


def test_a_second_follower_of_a_run_is_refused(run: Path) -> None:
    save(run, 1000, 1.0)
    first = Scores(run)
    with pytest.raises(UsageError, match="another process is evaluating this run"):
        follow(run)
    first.close()
    follow(run)
    assert steps(run) == [1000]


def test_evaluations_of_the_same_weights_are_the_same(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts and sampled actions come from one seed, and environments that stay open."""
    monkeypatch.setattr(play_module, "play", play)
    made: list[Any] = []

    def make(spec: EnvSpec, num_envs: int, **_: Any) -> Any:
        made.append((spec, num_envs))
        return make_environment(spec, num_envs)

    monkeypatch.setattr(play_module, "EnvProcess", make)
    watch = Watched()
    save(run, 500, 0.0)  # every action is as likely as the others
    follow(
        run,
        lambda: (save(run, 1000, 0.0), watch.leave()),
        watch=watch,
        sampled=True,
        num_episodes=40,
    )
    first, second = rows(run)
    ours = ("mean_episode_return", "distinct_episodes", "mean_episode_length")
    assert [first[name] for name in ours] == [second[name] for name in ours]
    assert -1 < first["mean_episode_return"] < 1 and len(made) == 1


def test_the_times_of_rows_do_not_go_back_with_the_clock(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while a follower goes on, nor when it is started again."""

    def set_clock(now: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now)

    watch = Watched()
    set_clock(1e9)
    save(run, 100, 1.0)
    follow(run, lambda: (set_clock(1e9 - 3600), save(run, 200, 2.0), watch.stop()), watch=watch)
    save(run, 300, 3.0)
    follow(run)
    times = [row["_time"] for row in rows(run)]
    assert times == sorted(times) and times[0] >= 1e9 and times[-1] < 1e9 + 60


def test_the_rows_can_be_plotted(run: Path) -> None:
    for step, score in ((100, 1.0), (200, 3.0)):
        save(run, step, score)
        follow(run)
    assert curve(run / "evaluations.csv") == [(100, 1.0), (200, 3.0)], "no moving average"


# --- the run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of watches, which count a run as stopped after 60 seconds."""
    clock = Clock()
    monkeypatch.setattr(following, "running_time", clock)
    monkeypatch.setattr(following, "QUIET_S", 60)
    return clock


def test_a_run_has_stopped_when_it_is_not_seen_and_writes_nothing(
    tmp_path: Path, clock: Clock
) -> None:
    folder = RunFolder(tmp_path / "run", {})
    watch = RunWatch(tmp_path / "run")
    clock.now = 100
    assert watch.is_running and not watch.has_stopped
    folder.finish(successful=True)
    clock.now = 150
    assert not watch.is_running and not watch.has_stopped
    clock.now = 209
    assert not watch.has_stopped
    clock.now = 211
    assert watch.has_stopped


def test_a_run_whose_lock_does_not_reach_here_is_seen_by_its_rows(
    tmp_path: Path, clock: Clock
) -> None:
    watch = RunWatch(tmp_path)
    for now in (50, 100, 150):
        clock.now = now
        (tmp_path / "logs.csv").write_text("row\n")
        os.utime(tmp_path / "logs.csv", (now, now))
        assert not watch.has_stopped
    clock.now = 220
    assert watch.has_stopped


def test_a_folder_without_a_run_has_not_stopped(tmp_path: Path, clock: Clock) -> None:
    watch = RunWatch(tmp_path / "run")
    clock.now = 10**6
    assert not watch.has_stopped


# --- the command line


def command(folder: Path, *words: str) -> int:
    where = ("--savedir", str(folder.parent), "--xpid", folder.name, "--mode", "test")
    return monobeast.main([*where, *words])


def finished(run: Path) -> None:
    save(run, 1000, 1.0)
    (run / "logs.csv").write_text("")


@pytest.mark.parametrize(
    "words", [(), ("--model", "mlp"), ("--algo", "ppo"), ("--seed", "3", "--num_episodes", "4")]
)
def test_a_run_of_any_agent_is_followed_without_its_flags(
    run: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    finished(run)
    assert command(run, "--follow", *words) == 0, capsys.readouterr().err
    assert steps(run) == [1000]
    seed = "3" if "--seed" in words else "0"
    assert f"deterministic, seed {seed}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (("--algo", "dqn"), "--algo must be ppo"),
        (("--model", "deep"), "--model must be mlp"),
        (("--use_lstm",), "--use_lstm must be False"),
    ],
)
def test_flags_of_another_agent_are_refused_with_both_sides(
    run: Path, words: tuple[str, ...], both: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(run)
    assert command(run, "--follow", *words) == 2
    assert f"{both}, as in the run run, not" in capsys.readouterr().err


def test_the_network_of_an_off_policy_run_is_named_as_in_training(tmp_path: Path) -> None:
    flags = {"algo": "dqn", "model": "mlp"}
    saved = {"flags": flags, "model": "q-mlp", "model_state_dict": {}, "format": 1}
    words = ["--savedir", str(tmp_path), "--xpid", "a", "--mode", "test", "--follow"]
    typed = parse(MonoBeastFlags, "monobeast", [*words, "--model", "mlp"])
    typed._check_typed(saved, tmp_path / "a" / "model.tar")


def test_the_best_can_be_played_by_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(run, 1000, 5.0)
    follow(run)
    (run / "model.tar").unlink()
    assert command(run, "--checkpoint", "evaluation_best.tar") == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"{run / 'evaluation_best.tar'}, step 1,000" in said and "Mean 5.00" in said
    assert command(run, "--checkpoint", "model.7.tar") == 2
    assert f"there is no checkpoint at {run / 'model.7.tar'}" in capsys.readouterr().err
