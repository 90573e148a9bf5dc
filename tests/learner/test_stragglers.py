# SPDX-License-Identifier: Apache-2.0
"""Gradient workers do not wait for the slowest of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from later import later
from small_schemes import scheme_of

from torchbeast import Learner
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.envs import make
from torchbeast.errors import IncompatibleParts

E, T = 2, 40
WHOLE = E * T
STRAGGLERS = {"fraction_workers": 0.5, "fraction_samples": 0.25}


class SlowInOne:
    """Catch, whose steps take long in the process that is the first to make the file."""

    def __init__(self, num_envs: int, file: str) -> None:
        self._env = make("Catch", num_envs)
        self.env_id = self._env.env_id
        self.observation_space = self._env.observation_space
        self.action_space, self.frame_stack = self._env.action_space, self._env.frame_stack
        self.num_envs, self._file = num_envs, Path(file)
        self._is_slow: bool | None = None

    def reset(self, seed: int) -> Any:
        return self._env.reset(seed)

    def step(self, action: Any) -> VecStep:
        if self._is_slow is None:
            self._is_slow = self._is_first()
        if self._is_slow:
            time.sleep(0.1)
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()

    def _is_first(self) -> bool:
        try:
            self._file.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@pytest.mark.parametrize("update_execution", ["centralised", later("decentralised")])
def test_a_slow_worker_is_cut_short_and_the_steps_that_it_lacks_do_not_count(
    tmp_path: Path, update_execution: str
) -> None:
    envs = {"env_fn": SlowInOne, "env_kwargs": {"file": str(tmp_path / "slow")}, "vec_env_size": E}
    scheme = scheme_of(
        envs=envs,
        storage=OnPolicyGAEBuffer.create_factory(size=T),
        grad_remote_workers=2,
        update_execution=update_execution,
        sync_col_specs=STRAGGLERS,
    )
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        before = [weight.clone() for weight in learner.actor.parameters()]
        learner.step()
        assert WHOLE + WHOLE / 4 <= learner.steps < 2 * WHOLE
        after = list(learner.actor.parameters())
    assert all(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(weight.isfinite().all() for weight in after)


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({}, "sync_col_specs control when gradient workers stop .*, but grad_remote_workers is 0"),
        (
            {"grad_remote_workers": 2, "col_remote_workers": 2},
            "sync_col_specs stop gradient workers .*, but with col_remote_workers others",
        ),
        (
            {"grad_remote_workers": 2, "grad_communication": "asynchronous"},
            'fraction_workers 0.5 .* with grad_communication="asynchronous"',
        ),
    ],
)
def test_where_nobody_waits_for_a_slow_worker_a_rule_is_refused(
    axes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(IncompatibleParts, match=sentence):
        scheme_of(**axes, sync_col_specs=STRAGGLERS)


def test_a_misspelt_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="fraction_workers"):
        scheme_of(grad_remote_workers=2, sync_col_specs={"fraction": 0.5})


def test_a_share_of_samples_without_a_share_of_workers_is_refused() -> None:
    with pytest.raises(IncompatibleParts, match="none is: add fraction_workers"):
        scheme_of(grad_remote_workers=2, sync_col_specs={"fraction_samples": 0.25})
