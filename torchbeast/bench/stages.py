# SPDX-License-Identifier: Apache-2.0
"""Prepares all stages of one setting for measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager

import torch

from torchbeast.bench import fixed_env, synthetic
from torchbeast.bench.environment import environments
from torchbeast.bench.inference import inference
from torchbeast.bench.learner import learner
from torchbeast.bench.limits import END_TO_END, ENVIRONMENT, INFERENCE, LEARNER, TRANSPORT
from torchbeast.bench.sample import Measure
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.core.actors.agent import Agent, make_agent
from torchbeast.core.algos.impala import Impala
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.spaces import ObservationSpace
from torchbeast.envs.opening import make_environment
from torchbeast.learning.hardware import Compute, share_cores
from torchbeast.learning.learner_run import impala_config, inference_threads, learner_threads
from torchbeast.processes.malloc import keep_freed_memory
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.servers.plan import ServerPlan, beside_the_learner

SINGLE = "transport, 1 environment a stream"


class Stages:
    """Makes the measurements of all stages for the given flags."""

    def __init__(self, flags: PolyBeastFlags, compute: Compute, supervisor: Supervisor) -> None:
        if compute.device.type == "cpu":
            keep_freed_memory()
        self._flags = flags
        self._compute = compute
        self._supervisor = supervisor
        self._env = flags.environment.spec
        self._plans = beside_the_learner(flags)
        self._agent, self._space = _agent(flags, compute)
        self._slice_threads = share_cores(compute, flags, self._agent)

    @contextmanager
    def ready(self, is_compiled: bool) -> Iterator[dict[str, Measure]]:
        """Yields the measurement of each stage by name.

        is_compiled: whether libtorchbeast is installed; without it, transport and end to end are
        left out.
        """
        with ExitStack() as opened:
            found: dict[str, Measure] = {ENVIRONMENT: opened.enter_context(self._environments())}
            if is_compiled:
                found |= self._transport(opened)
            found |= {INFERENCE: self._inference(), LEARNER: self._learner()}
            if is_compiled:
                found[END_TO_END] = self._end_to_end()
            yield found

    def _environments(self) -> AbstractContextManager[Measure]:
        return environments(self._env, self._plans, self._supervisor)

    def _transport(self, opened: ExitStack) -> dict[str, Measure]:
        """Measures the program's streams, and streams of one environment where those are larger."""
        from torchbeast.bench.transport import transport
        from torchbeast.sources.servers.source import PolySourceConfig

        config = PolySourceConfig(
            batch_size=self._flags.learning.batch_size,
            unroll_length=self._flags.learning.unroll_length,
            extras=(),
            max_queue_size=self._flags.pipeline.max_learner_queue_size,
        )
        plans = {TRANSPORT: self._plans, SINGLE: _with_one(self._plans)}
        if plans[SINGLE] == self._plans:
            del plans[SINGLE]
        zero = self._agent.model.distribution.zero_action
        served = fixed_env.like(self._env)
        return {
            name: opened.enter_context(transport(served, plan, config, zero, self._supervisor))
            for name, plan in plans.items()
        }

    def _inference(self) -> Measure:
        learning, device = self._flags.learning, self._compute.device
        return inference(
            self._agent,
            self._space,
            device,
            self._plans[0].envs_per_stream,
            inference_threads(self._flags.pipeline.num_inference_threads, device),
            learning.unroll_length * learning.batch_size,
            self._supervisor,
        )

    def _learner(self) -> Measure:
        learning, device = self._flags.learning, self._compute.device
        config = dataclasses.replace(
            impala_config(self._flags),
            bytes_at_once=self._compute.bytes_at_once,
            num_threads=self._slice_threads,
        )
        algo = Impala(self._agent.model, self._agent.model.distribution, config)
        rollout = synthetic.rollout(
            self._agent, self._space, learning.unroll_length, learning.batch_size
        )
        threads = learner_threads(self._flags.machine.num_learner_threads, device)
        return learner(algo, rollout, device, threads, self._supervisor)

    def _end_to_end(self) -> Measure:
        from torchbeast.bench.end_to_end import end_to_end

        return end_to_end(self._flags, self._supervisor)


def _agent(flags: PolyBeastFlags, compute: Compute) -> tuple[Agent, ObservationSpace]:
    """Returns the run's agent on its device, and the observation space it sees."""
    torch.set_num_threads(compute.threads)
    with closing(make_environment(flags.environment.spec, 1)) as env:
        spaces = env.observation_space, env.action_space, env.frame_stack
    agent = make_agent(flags.model.model, *spaces, flags.model.use_lstm)
    agent.model.to(compute.device)
    agent.model.compute_dtype = compute.dtype
    return agent, stacked_space(spaces[0], spaces[2])


def _with_one(plans: list[ServerPlan]) -> list[ServerPlan]:
    return [ServerPlan(plan.num_streams, 1) for plan in plans]
