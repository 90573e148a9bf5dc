# SPDX-License-Identifier: Apache-2.0
"""`--mode test --follow`: evaluates each new checkpoint of a run, in a separate process.

    run          model.tar ......... model.tar ......... model.tar, end
                     |                   |                   |
    follower     play, keep, row     play, keep, row     play, keep, row, end

Of the run's files it only reads, so it can be on any machine that sees the folder. It writes
evaluations.csv, with a row for each checkpoint, and evaluation_best.tar. It keeps the best
checkpoint before it writes the row. If it is killed in between, it evaluates that checkpoint again
when it is restarted, from the same starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE, RunError, UsageError
from torchbeast.evaluation.play import NEEDED, EpisodePlayer
from torchbeast.fleets.child_process import show_output
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import running_time, say, warn
from torchbeast.reporting.output import lossy_output
from torchbeast.reporting.run_folder import CHECKPOINT, is_in_use
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import EvaluationConfig
from torchbeast.run.periodic import Scores, WeightsId, weights_id_of

# A run writes a row for each update. The lock alone does not suffice: it may not work across
# machines, and a run that is started together with this process locks its folder seconds later.
QUIET_S = 120.0
_WRITTEN = (CHECKPOINT, "logs.csv", "out.log", "meta.json")
_POLL_S = 1.0

Check = Callable[[dict[str, Any], Path], None]
"""Raises UsageError if a checkpoint, at a path, has another agent than the user asked for."""


class RunWatch:
    """Watches the files of a run. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        """Starts to watch the folder, which need not exist yet."""
        self._folder, self._files = folder, [folder / name for name in _WRITTEN]
        self._seen, self._since = self._state(), running_time()

    @property
    def is_running(self) -> bool:
        """Whether a process visibly uses the folder."""
        return is_in_use(self._folder)

    @property
    def has_stopped(self) -> bool:
        """Whether the run exists, has no visible process, and has not written for QUIET_S.

        Call it every few seconds, also while the run is still writing.
        """
        state, now = self._state(), running_time()
        if state != self._seen or self.is_running:
            self._seen, self._since = state, now
        return any(state) and now - self._since >= QUIET_S

    def _state(self) -> list[float | None]:
        return list(map(_time_of, self._files))


def _time_of(path: Path) -> float | None:
    """Returns when a file was written, with a precision of 1 ms; None if it does not exist."""
    try:
        return round(path.stat().st_mtime, 3)
    except OSError:
        return None


def follow(folder: Path, config: EvaluationConfig, asked: EnvSpec, seed: int, check: Check) -> int:
    """Evaluates each new checkpoint until the run ends or a signal comes; returns the exit code.

    folder: of the run, which need not have started. asked: the environment; name and options of the
    training environment are the defaults. seed: of every evaluation. check: checks the first
    checkpoint.
    """
    supervisor = Supervisor()
    show_output()
    with lossy_output(), supervisor.signals(), ExitStack() as ending:
        with suppress(KeyboardInterrupt):
            watch = RunWatch(folder)
            RunFollower(folder, config, asked, seed, supervisor, ending, watch, check).run()
        if supervisor.ended:
            say(f"Stopped by {supervisor.reason}.")
    return EXIT_DONE


@dataclass
class RunFollower:
    """Evaluates the checkpoints of one run, in the thread that calls `run`, see `follow`.

    supervisor: its `stop` ends `run`. ending: closes the environments.
    """

    folder: Path
    config: EvaluationConfig
    asked: EnvSpec
    seed: int
    supervisor: Supervisor
    ending: ExitStack
    watch: RunWatch
    check: Check = lambda saved, path: None

    def __post_init__(self) -> None:
        self._path = self.folder / CHECKPOINT
        self._player: EpisodePlayer  # made for the first checkpoint, and used for all
        self._scores: Scores | None = None
        self._tried: float | None = None  # time of the newest file that was read
        self._problem: UsageError | RunError | None = None  # if that file could not be read
        self._learnt = self._target = 0  # env steps of the newest checkpoint, and of the run

    def run(self) -> None:
        """Evaluates until the run has ended.

        Raises RunError if it ended without a checkpoint, or the environment raises an exception,
        and UsageError or RunError if the last checkpoint cannot be read or played.
        """
        if not self._path.exists():
            say(f"Waiting for the first checkpoint, {self._path}.")
        while not self.supervisor.wait(0.0 if self._look() else _POLL_S):
            if self._has_ended() and not self._is_new():
                self._say_end()
                return

    def _is_new(self) -> bool:
        """Returns whether there is a file that has not been tried."""
        return _time_of(self._path) not in (None, self._tried)

    def _look(self) -> bool:
        """Evaluates the newest checkpoint if it is new, or could not be read before; returns
        whether it did.
        """
        if not self._is_new() and self._problem is None:
            return False
        self._tried = _time_of(self._path)  # a file that replaces it from now on is new
        try:
            saved = checkpoints.load(self._path, (*NEEDED, "stats"))
        except (UsageError, RunError) as error:
            if str(error) != str(self._problem):
                warn(f"{error}; waiting for the next checkpoint")
            self._problem = error
            return False
        self._problem = None
        self._learnt = int(saved["stats"].get("step", 0))
        self._target = int(saved["flags"].get("total_steps", 0))
        weights = weights_id_of(saved["model_state_dict"], self._learnt)
        scores = self._scores or self._open(saved, weights)
        if not scores.knows(weights):
            checkpoints.load_model(self._player.agent.model, saved, self._path)
            played = self._player.play(lambda _: self._check_goes_on())
            say(scores.add(weights, played, lambda: saved))
        return True

    def _open(self, saved: dict[str, Any], weights: WeightsId) -> Scores:
        """Makes the environments and the agent, and opens the files."""
        self.check(saved, self._path)
        # It raises if the best checkpoint is damaged, before playing.
        self._scores = self.ending.enter_context(closing(Scores(self.folder)))
        player = EpisodePlayer(
            saved, self._path, self.config, self.asked, self.seed, check_goes_on=self._check_goes_on
        )
        self._player = self.ending.enter_context(closing(player))
        say(
            f"Following the run in {self.folder}: {self.config.num_episodes} episodes of "
            f"{player.where} with each checkpoint, {player.how}, seed {self.seed}."
        )
        if self._scores.knows(weights):
            say(f"Step {self._learnt:,} was already evaluated.")
        return self._scores

    def _check_goes_on(self) -> None:
        """Ends an evaluation if a signal has come."""
        if self.supervisor.wait(0):
            raise KeyboardInterrupt

    def _has_ended(self) -> bool:
        """Returns whether the run has learnt all its steps, or has stopped before that.

        A run that is still running has not ended, because it may have been resumed with more steps.
        """
        return self.watch.has_stopped or (self._is_complete and not self.watch.is_running)

    @property
    def _is_complete(self) -> bool:
        return self._problem is None and 0 < self._target <= self._learnt

    def _say_end(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._scores is None:
            raise RunError(
                f"the run in {self.folder} stopped without a checkpoint: repeat this once it has "
                "one"
            )
        if self._is_complete:
            say(f"The run is complete ({self._target:,} steps).")
            return
        say(
            f"The run has stopped at step {self._learnt:,} of {self._target:,}. If you resume it, "
            "repeat this command to follow it."
        )
