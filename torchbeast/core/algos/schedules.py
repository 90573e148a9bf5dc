# SPDX-License-Identifier: Apache-2.0
"""Schedules: how a setting, such as the learning rate, changes over a run.

A setting X of an algorithm's Config has a schedule if the Config has a setting X_schedule too, and
perhaps final_X. `learning_rate`, `entropy_cost` and `clip_param` have them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torchbeast.core.base import specs
from torchbeast.core.base.checks import at_least, require

Shape = str | Callable[[float], float]
"""The type of a setting X_schedule. Functions get the share of the steps that are done, from 0 to
1, and return the share of the way from final_X (0) to X (1)."""

SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
}
_SUFFIX = "_schedule"


@dataclass(frozen=True)
class Schedule:
    """A setting that changes over a run.

    value = final + (initial - final) * shape(share)
    share = (step - start) / (total_steps - start), but at least 0 and at most 1
    """

    initial: float
    shape: Shape = "linear"
    final: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether the value changes."""
        return self.shape != "constant"

    def at(self, step: int, total_steps: int, start: int = 0) -> float:
        """Returns the value of an update that begins after `step` environment steps.

        Raises UsageError if the function of a user cannot be imported, or returns something else
        than a number of at least 0.
        """
        left = total_steps - start
        share = min(1.0, max(0.0, (step - start) / left)) if left > 0 else 1.0
        shape = self.shape
        if isinstance(shape, str):
            shape = SHAPES.get(shape) or specs.find_callable(shape)
        value = shape(share)
        part = float(value) if isinstance(value, Real) else math.nan
        if not 0 <= part < math.inf:
            raise specs.SpecError(
                f"the schedule {name_of(self.shape)} must return a number of at least 0, but for "
                f"the fraction {share:g} it returned {value!r}: return 1 for the initial value"
            )
        return self.final + (self.initial - self.final) * part

    def ending(self, total_steps: int) -> str:
        """Returns words about the rest of the run, for its start."""
        if self.shape == "constant":
            return "constant"
        end = f" to {self.final:g} at" if self.shape in SHAPES else " until"
        return f"{name_of(self.shape)}{end} step {total_steps:,}"


def name_of(shape: Shape) -> str:
    """Returns the name of a shape, with which runs record it."""
    if isinstance(shape, str):
        return shape
    named = shape if hasattr(shape, "__qualname__") else type(shape)
    return f"{named.__module__}:{named.__qualname__}"


def schedules_of(settings: Mapping[str, Any]) -> dict[str, Schedule]:
    """Returns the schedules among settings, by the setting that each of them changes."""
    return {
        name: Schedule(initial, settings[name + _SUFFIX], settings.get(f"final_{name}", 0.0))
        for name, initial in settings.items()
        if name + _SUFFIX in settings
    }


def check_schedules(config: Any) -> None:
    """Raises ValueError for a wrong X_schedule or final_X among the fields of a Config."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, schedule in schedules_of(settings).items():
        shape, final = schedule.shape, schedule.final
        known = shape in SHAPES or ":" in shape if isinstance(shape, str) else callable(shape)
        require(
            known,
            f"{name}{_SUFFIX} must be {', '.join(SHAPES)}, or a function of the fraction of the "
            f"steps done, as package.module:function, got {shape!r}",
        )
        at_least(0, **{f"final_{name}": final})
        require(
            not final or shape != "constant",
            f"final_{name} {final:g} has no effect if {name}{_SUFFIX} is constant: use linear or "
            f"cosine, or remove final_{name}",
        )
