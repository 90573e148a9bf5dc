# SPDX-License-Identifier: Apache-2.0
"""Measures the speed of a vector environment; imports only NumPy, so that any Python can run it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

Step = Callable[[np.ndarray], object]


def steps_per_second(step: Step, num_envs: int, num_actions: int, seconds: float) -> float:
    """Returns the steps/s with random actions; the first step is not timed."""
    actions = np.random.default_rng(0).integers(0, num_actions, (64, num_envs)).astype(np.int32)
    step(actions[0])
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step(actions[calls % len(actions)])
        calls += 1
    return calls * num_envs / (time.perf_counter() - began)
