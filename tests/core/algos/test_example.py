# SPDX-License-Identifier: Apache-2.0
"""The example algorithm: found by its name, and IMPALA's equal where V-trace has nothing to do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from learners import impala

from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.registry import find_algorithm
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout

NAME = "examples.advantage_actor_critic:AdvantageActorCritic"
T, B = 5, 3


def test_on_policy_it_learns_what_impala_learns(make_rollout: Callable[..., Rollout]) -> None:
    actor = MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)
    rollout = make_rollout(T, B, terminated=[(2, 0)], truncated=[(3, 1)])
    logits = unroll(actor, rollout).policy_logits.detach()
    rollout.extras["policy_logits"][1:] = logits[:-1]  # of the policy that learns
    theirs, ours = impala(copy.deepcopy(actor)), impala(actor, find_algorithm(NAME))
    theirs_terms = theirs.algo.losses(rollout).terms
    torch.testing.assert_close(ours.algo.losses(rollout).terms, theirs_terms)
    rollout.extras["policy_logits"][1:] *= -3.0
    another = theirs.algo.losses(rollout).terms
    assert not torch.allclose(another["pg_loss"], theirs_terms["pg_loss"]), "V-trace corrects"
    torch.testing.assert_close(ours.algo.losses(rollout).terms, theirs_terms)
