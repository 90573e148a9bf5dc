# SPDX-License-Identifier: Apache-2.0
"""Starts the source that plays in this process for the duration of a `with` block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compliance.source import Running, Setup

from torchbeast.collect.local import LocalSource
from torchbeast.collect.weights import PublishedWeights
from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.supervisor import Supervisor


@contextmanager
def running_local(setup: Setup, stops_early: Any = None) -> Iterator[Running]:
    """Starts a source."""
    learner = setup.learner(PublishedWeights, stops_early=stops_early)
    make = functools.partial(make_environment, EnvSpec(setup.env_id))
    source = LocalSource(learner, make, setup.num_envs)
    supervisor = Supervisor()
    try:
        source.start(supervisor)
        yield Running(source, learner.rollouts.agent, learner.weights, supervisor)
    finally:
        supervisor.stop("the test ended")
        source.end()
