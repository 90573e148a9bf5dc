# SPDX-License-Identifier: Apache-2.0
"""Starts the source that plays in this process for the duration of a `with` block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compliance.source import Running, Setup

from torchbeast.core.actors.registry import make_agent
from torchbeast.envs import make_environment
from torchbeast.learning.weights import PublishedWeights
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.config import RolloutConfig
from torchbeast.sources.local.source import LocalSource, LocalSourceConfig


@contextmanager
def running_local(setup: Setup, **options: Any) -> Iterator[Running]:
    """Starts a source; options: further settings."""
    observation, action, frame_stack = setup.spaces()
    torch.manual_seed(0)
    agent = make_agent(setup.actor(), observation, action, frame_stack)
    config = LocalSourceConfig(
        info_keywords=(),
        num_envs=setup.num_envs,
        precision="float32",
        rollouts=RolloutConfig(batch_size=setup.batch_size, unroll_length=setup.unroll_length),
        extras=setup.extras,
        mode=setup.mode,
        seed=setup.seed,
        **options,
    )
    weights = PublishedWeights(agent.model, setup.version)
    source = LocalSource(
        agent,
        weights,
        torch.device("cpu"),
        functools.partial(make_environment, setup.env_id),
        config,
    )
    supervisor = Supervisor()
    try:
        source.start(supervisor)
        yield Running(source, agent, weights, supervisor)
    finally:
        supervisor.stop("the test ended")
        source.end()
