# SPDX-License-Identifier: Apache-2.0
"""The metrics of a learner; docs/operations.md lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchbeast.reporting.display import Shown
from torchbeast.reporting.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class LearnerFigures:
    """The figures of a run at one moment that become metrics."""

    run: str  # name of the run
    shown: Shown
    updates: int
    status: Mapping[str, float]  # of the source
    seconds: Mapping[str, float]  # of acting and learning since the start, by stage
    row: Mapping[str, float]  # last row of the log
    saved_at: float  # Unix time of the last checkpoint of this process; NaN: none yet
    failed_saves: int


def learner_metrics(figures: LearnerFigures) -> list[Metric]:
    """Returns the metrics of a run."""
    return [*_progress(figures), *_workers(figures), *_checkpoints(figures), *_learning(figures)]


def _progress(figures: LearnerFigures) -> list[Metric]:
    shown = figures.shown
    return [
        Metric(name="run_info", help="1, for the run.", values={figures.run: 1.0}, label="xpid"),
        _total("env_steps", "Environment steps learnt from, since the run began.", shown.step),
        _total("updates", "Updates of the weights, since the run began.", figures.updates),
        _total("episodes", "Episodes that have ended, since the run began.", shown.episodes),
        _total(
            "collected_env_steps",
            "Environment steps since the program started, learnt from or not.",
            shown.collected,
        ),
        _gauge("target_env_steps", "Environment steps to learn from in all.", shown.total_steps),
        _gauge("mean_episode_return", "Mean return of the last episodes.", shown.mean_return),
        _gauge(
            "mean_episode_length",
            "Mean length of the last episodes in environment steps.",
            shown.mean_length,
        ),
    ]


def _workers(figures: LearnerFigures) -> list[Metric]:
    shown, status = figures.shown, figures.status
    kind, live = shown.collectors
    states = {"live": float(live), "lost": float(len(shown.away))}
    if "retired_streams" in status:
        states["retired"] = float(status["retired_streams"])
    found = [
        Metric(name=kind, help=f"The {kind} by what they do now.", values=states, label="state"),
        _gauge(
            "learner_queue_rollouts",
            "Rollouts that wait to be learnt from.",
            shown.learner_queue_size,
        ),
    ]
    for name, text in (
        ("lost_streams", "Times that a stream was lost, since the program started."),
        ("restarted_streams", "Times that a stream's environments failed and it got new ones."),
        ("replaced_actors", "Actors that were replaced, since the program started."),
    ):
        if name in status:
            found.append(_total(name, text, status[name]))
    if shown.replay_fill is not None:
        found.append(
            _gauge("replay_fill_ratio", "Share of the replay that is filled.", shown.replay_fill)
        )
    return found


def _checkpoints(figures: LearnerFigures) -> list[Metric]:
    return [
        _gauge(
            "last_checkpoint_timestamp_seconds",
            "Unix time of the last checkpoint of this process.",
            figures.saved_at,
        ),
        _total(
            "failed_checkpoints",
            "Checkpoints that could not be written, since the program started.",
            figures.failed_saves,
        ),
    ]


def _learning(figures: LearnerFigures) -> list[Metric]:
    seconds = "Seconds of all workers and learner threads, since the program started."
    return [
        Metric(
            name="stage_seconds",
            help=seconds,
            values=figures.seconds,
            label="stage",
            kind="counter",
        ),
        Metric(
            name="log",
            help="The figures of the last row of logs.csv.",
            values=figures.row,
            label="column",
        ),
    ]


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name=name, help=text, values=float(value))


def _total(name: str, text: str, value: float) -> Metric:
    return Metric(name=name, help=text, values=float(value), kind="counter")
