# SPDX-License-Identifier: Apache-2.0
"""A run in a caller's process has random numbers of its own, wherever an interrupt comes."""

from __future__ import annotations

import pytest
import torch

from torchbeast.core.base import computing
from torchbeast.core.base.computing import OwnProcess


def states(own: OwnProcess) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the random numbers of the run and of the caller."""
    with own:
        of_run = torch.get_rng_state()
    return of_run, torch.get_rng_state()


def test_an_interrupt_while_a_run_is_entered_mixes_no_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = OwnProcess()
    with torch.random.fork_rng(devices=[]):
        with own:
            torch.manual_seed(1)
        before, use = states(own), computing._use

        def interrupted(threads: int, random: torch.Tensor) -> None:
            use(threads, random)
            monkeypatch.setattr(computing, "_use", use)
            raise KeyboardInterrupt

        monkeypatch.setattr(computing, "_use", interrupted)
        with pytest.raises(KeyboardInterrupt), own:
            pass
        for one, other in zip(states(own), before, strict=True):
            assert torch.equal(one, other)
