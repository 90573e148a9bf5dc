# SPDX-License-Identifier: Apache-2.0
"""Makes the agent of a scheme."""

from __future__ import annotations

from torchbeast.core.actors.agent import Agent, make_agent
from torchbeast.core.specs import ActorSpec
from torchbeast.learning.assemble import MakeAgent
from torchbeast.schemes.scheme import Scheme


def making_agent(scheme: Scheme) -> MakeAgent:
    """Returns a function that makes the agent of the scheme for a spec of its network."""
    envs = scheme.train_envs_factory

    def make(spec: ActorSpec) -> Agent:
        agent = make_agent(spec, envs.sent_space, envs.action_space, envs.frame_stack)
        scheme.actor_factory.restart(agent.model)
        return agent

    return make
