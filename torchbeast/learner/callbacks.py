# SPDX-License-Identifier: Apache-2.0
"""The callbacks of a Learner: their state in checkpoints, and the row that they add figures to."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchbeast.errors import UsageError
from torchbeast.learner.callback import Callback
from torchbeast.reporting.log_files import Log, LoggedRun, Logger, Logs


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises UsageError unless they are a sequence of callbacks, each with a name of its own."""
    if not isinstance(callbacks, Sequence):
        raise UsageError(
            f"callbacks must be a list of callbacks, got {callbacks!r}: write callbacks=[...]"
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = f", write {callback.__name__}()" if isinstance(callback, type) else ""
            raise UsageError(
                f"callbacks must be objects of subclasses of Callback, got {callback!r}{hint}"
            )
        _check_methods(callback)
    _check_names(callbacks)


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Raises UsageError unless they are a sequence of loggers."""
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise UsageError(f"loggers must be a list of loggers, got {loggers!r}")
    for logger in loggers:
        if isinstance(logger, type) or not callable(getattr(logger, "open", None)):
            raise UsageError(
                "loggers must be objects with a method open(run), such as "
                f"torchbeast.reporting.StdoutLogger(...), got {logger!r}"
            )


def _check_methods(callback: Callback) -> None:
    """Raises UsageError for a method that looks like one of a callback's, which nothing calls."""
    called = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in called:
            raise UsageError(
                f"callback {type(callback).__name__} has {name}, which nothing calls: a Learner "
                f"calls {', '.join(called)}; give another method a name that begins otherwise"
            )


def _check_names(callbacks: Sequence[Callback]) -> None:
    counted = Counter(callback.name for callback in callbacks)
    if again := [name for name, count in counted.items() if count > 1]:
        raise UsageError(
            f"several callbacks are named {again[0]!r}, by which checkpoints have their state: "
            "give them different names"
        )


def keep_numbers(figures: dict[str, Any]) -> None:
    """Makes all figures plain numbers, such as that of a tensor.

    Those that are none are removed, as no log could write them, and then ValueError is raised.
    """
    wrong = {name: value for name, value in figures.items() if not _is_number(value)}
    for name in wrong:
        del figures[name]
    for name, value in figures.items():
        figures[name] = value if isinstance(value, int | float) else float(value)
    for name, value in wrong.items():
        raise ValueError(f"figures[{name!r}] must be a number, got {value!r}")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers: RuntimeError
        return False
    return not isinstance(value, str | bytes)


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Returns the states by name, for a checkpoint.

    Raises UsageError for one that no checkpoint could be loaded with.
    """
    states = {callback.name: callback.state_dict() for callback in callbacks}
    for name, state in states.items():
        _check_loads(name, state)
    return states


def load_states(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> None:
    """Restores the states that there are."""
    for callback in callbacks:
        if callback.name in states:
            callback.load_state_dict(states[callback.name])


def _check_loads(name: str, state: Any) -> None:
    data = io.BytesIO()
    try:
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise UsageError(
            f"the state_dict of callback {name} must have tensors and plain values only, as every "
            f"entry of a checkpoint: {str(error).splitlines()[0]}"
        ) from error


class RowInHand:
    """Keeps each row of the logs until callbacks have added their figures."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.figures: dict[str, float] = {}  # of the last row
        self._loggers = loggers
        self._log: Log | None = None
        self._step: int | None = None  # of the row that is kept

    def open(self, run: LoggedRun) -> RowInHand:
        """Opens the logs."""
        self._log = Logs(self._loggers, run)
        return self

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Keeps a row; one that was kept is released before."""
        self.release()
        self._step, self.figures = step, dict(figures)

    def release(self) -> None:
        """Writes the row that is kept, if any."""
        step, self._step = self._step, None
        if self._log is not None and step is not None:
            self._log.write(step, self.figures)

    def close(self) -> None:
        """Writes the last row and closes the logs."""
        self.release()
        if self._log is not None:
            self._log.close()
