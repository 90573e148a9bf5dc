# SPDX-License-Identifier: Apache-2.0
"""Everything that logs a run has one interface: it is opened, gets rows, and is closed."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from torchbeast.errors import UsageError
from torchbeast.reporting import StdoutLogger, TensorBoardLogger, WandbLogger, loggers
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.loggers import (
    LogConfig,
    LoggedRun,
    Logs,
    TensorBoardLog,
    ThinnedLogger,
    grouped,
    upload_video,
)
from torchbeast.reporting.run_folder import RunFolder


def run_in(folder: Path, step: int = 0, **settings: Any) -> LoggedRun:
    return LoggedRun(folder=folder, settings=settings, step=step)


class Noted:
    """A logger, and its own log, that notes what is called."""

    def __init__(
        self, name: str, calls: list[Any], fails: str = "", error: type[Exception] = ValueError
    ) -> None:
        self.name, self.calls, self.fails, self.error = name, calls, fails, error

    def _note(self, what: str, *more: Any) -> None:
        self.calls.append((self.name, what, *more))
        if what == self.fails:
            raise self.error(what)

    def open(self, run: LoggedRun) -> Noted:
        self._note("open", run.folder.name)
        return self

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("write", step, dict(metrics))

    def close(self) -> None:
        self._note("close")


def test_every_log_gets_every_row(tmp_path: Path) -> None:
    calls: list[Any] = []
    logs = Logs([Noted("a", calls), Noted("b", calls)], run_in(tmp_path / "mine"))
    logs.write(10, {"loss": 1.0})
    logs.close()
    assert calls == [
        *[("a", "open", "mine"), ("b", "open", "mine")],
        *[("a", "write", 10, {"loss": 1.0}), ("b", "write", 10, {"loss": 1.0})],
        *[("b", "close"), ("a", "close")],
    ]


def test_a_row_of_an_interval_sums_times_and_averages_over_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    clock = iter([0.0, 0.0, 5.0, 9.0, 11.0, 11.0, 12.0, 12.0])  # of each update, and of each row
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = ThinnedLogger([Noted("a", calls)], 10.0).open(run_in(tmp_path))

    def update(step: int, episodes: int, mean: float, **more: float) -> None:
        log.write(step, {"episodes": episodes, "mean_episode_return": mean, "time_a": 0.5, **more})

    update(10, episodes=5, mean=7.0)
    update(20, episodes=5, mean=math.nan, loss=3.0)
    update(30, episodes=8, mean=1.0, info_won=1.0, loss=2.0)
    assert len(calls) == 2, "opened, and the first row"
    update(40, episodes=9, mean=5.0, info_won=math.nan)
    update(50, episodes=9, mean=math.nan)
    log.close()
    first, second, last = [call[2:] for call in calls[1:4]]
    assert first == (10, {"episodes": 5, "mean_episode_return": 7.0, "time_a": 0.5})
    assert second[0] == 40 and second[1] == {
        "episodes": 9,
        "mean_episode_return": 2.0,  # 3 episodes with 1, one with 5
        "time_a": 1.5,
        "loss": 2.0,
        "info_won": 1.0,
    }
    assert last[0] == 50 and last[1]["time_a"] == 0.5 and calls[4:] == [("a", "close")]


def test_the_table_has_every_update_and_charts_one_a_second(tmp_path: Path) -> None:
    logs = Logs(LogConfig().loggers(), run_in(tmp_path))
    steps = range(10, 1010, 10)
    for step in steps:
        logs.write(step, {"loss": float(step)})
    logs.close()
    assert len(list(read_logs(tmp_path))) == len(steps)
    charted = scalars(tmp_path, "train/loss")
    assert 2 <= len(charted) < len(steps) / 2
    assert charted[0] == (10, 10.0) and charted[-1] == (1000, 1000.0)


def test_the_flags_of_logs_choose_loggers(tmp_path: Path) -> None:
    Logs(LogConfig(disable_tensorboard=True).loggers(), run_in(tmp_path)).close()
    assert [path.name for path in tmp_path.iterdir()] == ["logs.csv"]
    (table, _) = LogConfig(log_interval=60.0).loggers()
    assert isinstance(table, ThinnedLogger)


def test_logs_are_closed_when_a_later_one_cannot_be_opened(tmp_path: Path) -> None:
    calls: list[Any] = []
    with pytest.raises(ValueError):
        Logs([Noted("a", calls), Noted("b", calls, fails="open")], run_in(tmp_path))
    assert calls[-1] == ("a", "close")


@pytest.mark.parametrize("error", [PermissionError, UnicodeError])
def test_a_run_continues_without_a_log_that_cannot_be_opened_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    calls: list[Any] = []
    failing = Noted("a", calls, fails="open", error=error)
    logs = Logs([failing, Noted("b", calls)], run_in(tmp_path))
    logs.write(10, {"loss": 1.0})
    logs.close()
    assert calls[2:] == [("b", "write", 10, {"loss": 1.0}), ("b", "close")]
    (warned,) = caplog.messages
    assert warned == "Noted cannot log this run: open. The run continues without it"


def test_a_run_in_a_folder_that_is_not_utf_8_is_logged_in_files(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    opened = RunFolder(folder, {"savedir": str(folder)})
    logs = Logs(LogConfig().loggers(), run_in(folder))
    logging.getLogger("torchbeast").warning("in %s", folder)
    logs.write(10, {"loss": 1.0})
    logs.close()
    opened.finish(successful=True)
    assert [row["loss"] for row in read_logs(folder)] == [1.0]
    assert "caf\\udce9" in (folder / "out.log").read_text()


def test_a_run_whose_csv_file_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs.csv").symlink_to("logs.csv")
    with pytest.raises(UsageError, match=r"logs\.csv cannot be used \(Too many levels"):
        Logs(LogConfig().loggers(), run_in(tmp_path))


def test_logs_are_closed_when_another_one_cannot_be(tmp_path: Path) -> None:
    calls: list[Any] = []
    logs = Logs([Noted("a", calls), Noted("b", calls, fails="close")], run_in(tmp_path))
    with pytest.raises(ValueError):
        logs.close()
    assert calls[-1] == ("a", "close")


# --- TensorBoard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Reads events as TensorBoard does."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_each_figure_and_hides_those_after_the_checkpoint(tmp_path: Path) -> None:
    log = TensorBoardLogger().open(run_in(tmp_path))
    for step in (10, 20, 30):
        log.write(step, {"loss": float(step), "lag": float("nan")})
    log.close()
    assert scalars(tmp_path, "train/loss") == [(10, 10.0), (20, 20.0), (30, 30.0)]
    # Readers sort files by name: the second and a number, of which 10 comes before 9.
    (file,) = tmp_path.glob("events*")
    file.rename(tmp_path / "events.out.tfevents.0000000001")
    resumed = TensorBoardLogger().open(run_in(tmp_path, step=20))
    resumed.write(25, {"loss": 1.0})
    resumed.close()
    assert scalars(tmp_path, "train/loss") == [(10, 10.0), (20, 20.0), (25, 1.0)]


class Writer:
    """Takes the place of a SummaryWriter."""

    def __init__(self, works: bool) -> None:
        self.works, self.steps = works, list[int]()

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        if not self.works:  # as its thread, after a lack of descriptors or room
            raise OSError(24, "Too many open files")
        self.steps.append(step)


def test_rows_go_to_another_writer_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Writer(False), Writer(False), Writer(True)]
    log = TensorBoardLog(made[0], iter(made[1:]).__next__)
    for step in (1, 2):  # before the pause has passed, no third one is made
        with pytest.raises(OSError, match="Too many"):
            log.write(step, {"loss": 1.0})
    now = time.monotonic()
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now + 10.0))
    with pytest.raises(OSError, match="Too many"):
        log.write(3, {"loss": 1.0})
    log.write(4, {"loss": 1.0})
    assert made[2].steps == [4]


def test_metrics_are_in_the_group_where_people_look_for_them() -> None:
    row = {
        **{"mean_return": 1.0, "mean_length": 2.0, "mean_episode_return": 3.0, "episodes": 4},
        **{"info_won": 5.0, "total_loss": 6.0, "learning_rate": 7.0, "approx_kl": math.nan},
        **{"time_learning": 8.0, "steps_per_second": 9.0, "mean_lag": 10.0, "live_workers": 2},
        **{"learner_queue_size": 11, "learnt_steps": 12, "mine": 13.0, "critics_grad_norm": 14.0},
        **{"evaluation_mean_return": 15.0, "hard_mean_length": 16.0, "rollout/my_steps": 17.0},
    }
    assert grouped(row) == {
        **{"rollout/mean_return": 1.0, "rollout/mean_length": 2.0, "rollout/episodes": 4},
        **{"rollout/info_won": 5.0, "train/total_loss": 6.0, "train/learning_rate": 7.0},
        **{"time/learning": 8.0, "time/steps_per_second": 9.0, "time/mean_lag": 10.0},
        **{"time/live_workers": 2, "time/learner_queue_size": 11, "time/learnt_steps": 12},
        **{"train/mine": 13.0, "train/critics_grad_norm": 14.0},
        **{"eval/mean_return": 15.0, "eval/hard_mean_length": 16.0, "rollout/my_steps": 17.0},
    }


def test_tensorboard_finds_one_run_with_its_settings(tmp_path: Path) -> None:
    """Neither the settings nor the link to the latest run count as another run."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories

    folder = RunFolder(tmp_path / "pong", {})
    log = TensorBoardLogger().open(run_in(folder.path, lr=0.1, env="Pong", env_kwargs={"a": None}))
    folder.become_latest()
    log.write(10, {"mean_return": 1.0})
    log.close()
    folder.finish(successful=True)
    assert [*GetLogdirSubdirectories(str(tmp_path))] == [str(folder.path)]
    events = EventAccumulator(str(folder.path))
    events.Reload()
    (text,) = events.Tensors("settings/text_summary")
    assert b"| env_kwargs | {'a': None} |" in text.tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_without_tensorboard_one_line_tells_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    loggers._say_missing.cache_clear()
    for _ in range(2):
        TensorBoardLogger().open(run_in(tmp_path)).close()
    assert capsys.readouterr().out.count("pip install 'torchbeast[tensorboard]'") == 1


# --- stdout


def test_stdout_gets_the_newest_figures_every_so_often_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = StdoutLogger(["loss", "won"], every_seconds=10).open(run_in(tmp_path))
    for now[0], metrics in (
        (0.0, {"loss": 1.0, "lag": 1.0}),
        (5.0, {"loss": 2.0, "won": 1.0}),
        (10.0, {"loss": 3.0, "won": float("nan")}),
        (12.0, {"loss": 4.0}),
    ):
        log.write(1000 + int(now[0]), metrics)
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 1,000  loss 1",
        "step 1,010  loss 3  won 1",
        "step 1,012  loss 4",
    ]


# --- Weights & Biases


class FakeRun:
    """What is used of a wandb.Run, as its documentation has it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.artifacts: list[tuple[str, str, str]] = []
        self.axes: dict[str, str | None] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert step_metric is None or step_metric in self.axes, "define it first"
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any]) -> None:
        assert not self.finished
        self.rows.append(data)

    def log_artifact(self, path: str, *, name: str, type: str) -> None:
        assert not self.finished
        self.artifacts.append((Path(path).name, name, type))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(ModuleType):
    """What is used of the package wandb."""

    class Error(Exception): ...

    class Refusal(Error): ...

    def __init__(self) -> None:
        super().__init__("wandb")
        self.errors = SimpleNamespace(UsageError=self.Refusal, AuthenticationError=self.Refusal)
        self.begun: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.refused: Exception | None = None

    def Video(self, path: str, *, format: str) -> tuple[str, str]:
        return Path(path).name, format

    def Settings(self, *, console: str) -> str:
        return f"console {console}"

    def init(
        self,
        *,
        project: str,
        name: str,
        id: str,
        dir: str,
        config: dict[str, Any],
        allow_val_change: bool,
        resume: str,
        reinit: str,
        settings: Any,
        tags: Any = None,
    ) -> FakeRun:
        if self.refused is not None:
            raise self.refused
        self.begun.append(locals())
        self.runs.append(FakeRun())
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_weights_and_biases_gets_name_settings_and_rows_over_env_steps(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    log = WandbLogger("games", tags=["mine"]).open(run_in(tmp_path / "pong", lr=0.1))
    log.write(10, {"loss": 2.0, "mean_lag": float("nan")})
    log.write(20, {"loss": 1.0, "mean_lag": 3.0})
    log.close()
    (begun,), (run,) = wandb.begun, wandb.runs
    assert (begun["project"], begun["name"], begun["config"]) == ("games", "pong", {"lr": 0.1})
    assert begun["tags"] == ["mine"] and Path(begun["dir"]) == tmp_path / "pong"
    assert run.rows == [
        {"step": 10, "train/loss": 2.0},
        {"step": 20, "train/loss": 1.0, "time/mean_lag": 3.0},
    ]
    assert run.axes["*"] == "step" and run.finished


@pytest.mark.parametrize("asked", [False, True])
def test_checkpoints_and_videos_are_uploaded_only_when_asked(
    tmp_path: Path, wandb: FakeWandb, asked: bool
) -> None:
    flags = {"wandb_project": "games", "wandb_upload": asked}
    folder = RunFolder(tmp_path / "my run", flags)
    (_, charts) = LogConfig(**flags).loggers()
    log = charts.open(run_in(folder.path, **flags))
    for name in ("model.tar", "evaluation_best.tar", "model.1.tar"):
        (folder.path / name).touch()
    log.close()
    folder.finish(successful=True)
    upload_video(folder.path, 20, folder.path / "video.mp4")
    assert [artifact for run in wandb.runs for artifact in run.artifacts] == asked * [
        ("model.tar", "my-run-model", "model"),
        ("evaluation_best.tar", "my-run-evaluation_best", "model"),
    ]
    assert [row for run in wandb.runs for row in run.rows] == asked * [
        {"step": 20, "eval/video": ("video.mp4", "mp4")}
    ]
    assert len({begun["id"] for begun in wandb.begun}) == 1


def test_what_weights_and_biases_refuses_during_a_run_ends_no_run(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / ("x" * 129)).mkdir()
    (folder / "model.tar").touch()
    logs = Logs([WandbLogger("games", upload=True)], run_in(folder))
    (run,) = wandb.runs

    def refuse(*_: object, **__: object) -> None:
        raise wandb.Error("the run is finished")

    monkeypatch.setattr(run, "log", refuse)
    logs.write(1, {"loss": 1.0})
    logs.close()
    ((_, name, _),) = run.artifacts
    assert len(name) == 128 and name.endswith("x-model") and run.finished


def test_an_upload_needs_a_project() -> None:
    with pytest.raises(ValueError, match="set wandb_project too"):
        LogConfig(wandb_upload=True)


def test_a_resumed_run_goes_on_as_the_same_run_and_another_folder_is_another(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    for folder in ("a", "a", "b"):
        WandbLogger("games").open(run_in(tmp_path / folder)).close()
    first, again, other = (begun["id"] for begun in wandb.begun)
    assert first == again != other
    assert {begun["resume"] for begun in wandb.begun} == {"allow"}


def test_without_the_package_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'torchbeast\[wandb\]'"):
        WandbLogger("games").open(run_in(tmp_path))


def test_a_refusal_of_weights_and_biases_says_what_to_do(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.refused = wandb.Refusal("api_key not configured (no-tty)")
    with pytest.raises(UsageError, match="api_key not configured.*WANDB_MODE=offline"):
        WandbLogger("games").open(run_in(tmp_path))


def test_a_run_whose_weights_and_biases_are_out_of_reach_continues(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.refused = wandb.Error("timed out")
    Logs([WandbLogger("games")], run_in(tmp_path)).close()
    assert "WandbLogger cannot log this run: timed out" in caplog.text


def test_the_real_package_writes_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("model.tar", "video.mp4"):
        (tmp_path / name).write_bytes(b"x")
    for step in (10, 20):
        log = WandbLogger("games", upload=True).open(run_in(tmp_path, step=step - 10, lr=0.125))
        log.write(step, {"loss_of_test": 1.0 / step})
        log.add_video(step, tmp_path / "video.mp4")
        log.close()
    id = (tmp_path / "wandb" / "torchbeast_id").read_text()
    written = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{id}.wandb"))
    assert written and b"loss_of_test" in b"".join(path.read_bytes() for path in written)
    assert set(inspect.signature(FakeWandb().init).parameters) <= set(
        inspect.signature(real.init).parameters
    )
    assert {"console"} <= set(real.Settings.model_fields), "as of the fake"
    assert issubclass(real.errors.UsageError, real.Error)
    assert issubclass(real.errors.AuthenticationError, real.Error)
