# SPDX-License-Identifier: Apache-2.0
"""Prepares all stages of one setting for measurement."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from bench import fixed_env, synthetic
from bench.environment import environments
from bench.inference import inference
from bench.learner import learner
from bench.limits import END_TO_END, ENVIRONMENT, INFERENCE, LEARNER, REPLAY, TRANSPORT
from bench.network_cost import costs, table
from bench.replay import replay, shared_replay
from bench.sample import Measure, check_goes_on
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.envs.env_process import spaces_of
from torchbeast.errors import UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import keep_freed_memory
from torchbeast.run.assemble import assemble
from torchbeast.servers.env_servers import ServerPlan, plans_for_local_servers
from torchbeast.servers.source import inference_threads

SHARED = "replay, shared"
SINGLE = "transport, 1 env per stream"


class Stages:
    """Makes the measurements of all stages for the given flags."""

    def __init__(self, flags: PolyBeastFlags, supervisor: Supervisor) -> None:
        """Raises UsageError when the algorithm learns from other batches than rollouts."""
        self._flags = flags
        self._supervisor = supervisor
        self._env = flags.environment.spec
        self._config = flags.learner_config(self._env.name)
        if self._config.learns_from_transitions:
            raise UsageError("bench measures rollouts: choose an algorithm that trains on them")
        self.plans = plans_for_local_servers(flags.fleet, flags.hardware.stays_on_cpu)
        check = functools.partial(check_goes_on, supervisor)
        spaces = spaces_of(self._env, check)

        def agent(spec: ActorSpec) -> Agent:
            return make_agent(spec, *spaces)

        made = assemble(self._config, agent, PublishedWeights)
        keep_freed_memory(made.compute.device.type)
        self._agent, self._step, self.compute = made.agent, made.optimiser_step, made.compute
        self.summary = made.compute.summary(made.agent.model)
        self._algo = made.algo
        self._space = stacked_space(spaces[0], spaces[2])
        self.frame_bytes = num_bytes(spaces[0])  # of one environment

    def cost_of_leaves(self) -> str:
        """Returns the cost of the network, and of each leaf of an observation, as text."""
        return table(costs(self._agent.model, self._space))

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
            found[INFERENCE] = self._inference()
            if self._config.replay.is_used:
                settings = self._config, self._agent, self._algo.needs, self._supervisor
                found[REPLAY] = opened.enter_context(replay(*settings))
                found[SHARED] = opened.enter_context(shared_replay(*settings))
            found[LEARNER] = self._learner()
            if is_compiled:
                found[END_TO_END] = self._end_to_end()
            yield found

    def _environments(self) -> AbstractContextManager[Measure]:
        return environments(self._env, self.plans, self._supervisor)

    def _transport(self, opened: ExitStack) -> dict[str, Measure]:
        """Measures the program's streams, and streams of one environment where those are larger."""
        from bench.transport import transport

        settings = self._flags.rollouts, self._flags.pipeline
        end = self._agent.model.distribution.zero_action, self._supervisor
        plans = {TRANSPORT: self.plans, SINGLE: _with_one(self.plans)}
        if plans[SINGLE] == self.plans:
            del plans[SINGLE]
        served = fixed_env.like(self._env)
        return {
            name: opened.enter_context(transport(served, plan, *settings, *end))
            for name, plan in plans.items()
        }

    def _inference(self) -> Measure:
        rollouts, device = self._flags.rollouts, self.compute.device
        return inference(
            self._agent,
            self._space,
            device,
            self.plans[0].envs_per_stream,
            inference_threads(self._flags.pipeline.num_inference_threads, device),
            rollouts.unroll_length * rollouts.batch_size,
            self._supervisor,
            extras=self._algo.needs,
            mode=self._algo.mode,
        )

    def _learner(self) -> Measure:
        rollouts = self._flags.rollouts
        batch = synthetic.rollout(
            self._agent,
            self._space,
            rollouts.unroll_length,
            rollouts.batch_size,
            extras=self._algo.needs,
            spare_columns=self._config.spare_columns,
        )
        threads = self.compute.learner_threads
        return learner(self._step, batch, self.compute.device, threads, self._supervisor)

    def _end_to_end(self) -> Measure:
        from bench.end_to_end import end_to_end

        return end_to_end(self._flags, self._supervisor)


def _with_one(plans: list[ServerPlan]) -> list[ServerPlan]:
    return [ServerPlan(plan.num_streams, 1) for plan in plans]
