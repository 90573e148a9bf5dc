# SPDX-License-Identifier: Apache-2.0
"""Starts MonoBeast's source for the duration of a `with` block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compliance.source import Running, Setup

from torchbeast.core.actors.registry import make_agent
from torchbeast.envs import EnvSpec
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.config import RolloutConfig
from torchbeast.sources.processes.config import ProcessesConfig
from torchbeast.sources.processes.shared_weights import SharedWeights
from torchbeast.sources.processes.source import MonoSource, MonoSourceConfig, ring_size

SOON = 30.0


def config_of(**settings: Any) -> MonoSourceConfig:
    """Returns the settings of a source; those of nested Configs are given by name."""

    def taken(config: type) -> Any:
        names = {field.name for field in dataclasses.fields(config)} & set(settings)
        return config(**{name: settings.pop(name) for name in names})

    processes, rollouts = taken(ProcessesConfig), taken(RolloutConfig)
    usual = {"precision": "float32", "mode": "sample", "seed": 0}
    return MonoSourceConfig(processes=processes, rollouts=rollouts, **{**usual, **settings})


@contextmanager
def running_mono(setup: Setup, **options: Any) -> Iterator[Running]:
    """Starts a source; options: further settings. By default an environment has two buffers."""
    observation, action, frame_stack = setup.spaces()
    torch.manual_seed(0)
    agent = make_agent(setup.actor(), observation, action, frame_stack)
    config = config_of(
        **{
            "env": EnvSpec(setup.env_id),
            "actor": setup.actor(),
            "num_actors": setup.num_envs,
            "num_processes": setup.num_groups,
            "batch_size": setup.batch_size,
            "unroll_length": setup.unroll_length,
            "extras": setup.extras,
            "mode": setup.mode,
            "seed": setup.seed,
            **options,
        }
    )
    weights = SharedWeights(agent.model, setup.version, ring_size(config.processes.fixed_lag))
    source = MonoSource(agent, weights, torch.device("cpu"), config)
    supervisor = Supervisor()
    try:
        source.start(supervisor)
        yield Running(source, agent, weights, supervisor)
    finally:
        supervisor.stop("the test ended")
        source.end()
        assert supervisor.join(SOON) == []
