# SPDX-License-Identifier: Apache-2.0
"""The code in docs/how-to/extending.md runs as it stands there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import impala, ppo
from torch import Tensor

from torchbeast.core.actors.contract import ActorCritic, ModelInputs
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.unroll import policies_and_values
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extending.md"
T, B = 6, 3


def block(first_words: str) -> str:
    """Returns the only block of the page that contains these words."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (found,) = (code for code in blocks if first_words in code)
    return found


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ActorCritic:
    """The recurrent network of the page."""
    (tmp_path / "my_module.py").write_text(block("class MyRecurrentNet("))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    spec = ActorSpec("my_module:MyRecurrentNet")
    made = make_model(spec, ArraySpec((4,), "float32"), Discrete(3))
    assert isinstance(made, ActorCritic)
    return made


def inputs_with_done(*places: tuple[int, int]) -> ModelInputs:
    """Returns random inputs [T, B, ...] that are done at these rows and columns."""
    done = torch.zeros(T, B, dtype=torch.bool)
    for place in places:
        done[place] = True
    return ModelInputs(torch.randn(T, B, 4), torch.randn(T, B), done, torch.zeros(T, B).long())


def rows_of(inputs: ModelInputs, start: int, end: int) -> ModelInputs:
    return ModelInputs(*(leaf[start:end] for leaf in inputs if isinstance(leaf, Tensor)))


def test_the_bonus_on_the_page_is_a_term_of_its_own(make_rollout: Callable[..., Rollout]) -> None:
    own: dict[str, Any] = {}
    exec(block("class PPOWithBonus("), own)
    rollout = make_rollout(T, B)
    net = MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)
    entropies = net.distribution.entropy(policies_and_values(net, rollout)[0])
    weights = rollout.observation[:-1].abs().mean(-1)
    settings = {"num_mini_batch": 1, "num_epochs": 1, "entropy_cost": 0.0}
    step = ppo(net, own["PPOWithBonus"], **settings)
    metrics = step.update(rollout).metrics
    assert metrics["bonus_loss"] == pytest.approx(-0.01 * (weights * entropies).mean().item())
    assert metrics["entropy_loss"] == 0 and metrics["total_loss"] == pytest.approx(
        sum(metrics[name] for name in ("pg_loss", "baseline_loss", "bonus_loss"))
    )


def test_the_recurrent_network_is_trained(
    model: ActorCritic, make_rollout: Callable[..., Rollout]
) -> None:
    ends = {"terminated": [(2, 0)], "truncated": [(3, 1)]}
    rollout = make_rollout(T, B, state=model.initial_state(B), **ends)
    before = [weight.detach().clone() for weight in model.parameters()]
    impala(model).update(rollout)
    after = list(model.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_recurrent_network_forgets_before_a_done_row_and_only_there(model: ActorCritic) -> None:
    inputs, row, column = inputs_with_done((4, 1)), 4, 1
    others = [c for c in range(B) if c != column]
    with torch.no_grad():
        values = model(inputs, model.initial_state(B)).baseline[row:]
        fresh = model(rows_of(inputs, row, T), model.initial_state(B)).baseline
        never_done = inputs._replace(done=torch.zeros(T, B, dtype=torch.bool))
        remembering = model(never_done, model.initial_state(B)).baseline[row:]
    assert (fresh - remembering).abs().amax(0).min() > 1e-3, "the state changes all values"
    torch.testing.assert_close(values[:, column], fresh[:, column])
    torch.testing.assert_close(values[:, others], remembering[:, others])
