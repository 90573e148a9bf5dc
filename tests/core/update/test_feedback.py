# SPDX-License-Identifier: Apache-2.0
"""The feedback of slices and minibatches, joined to that of their batch."""

from __future__ import annotations

import pytest
import torch

from torchbeast.core.storages.batch import Feedback
from torchbeast.core.update.minibatch import joined_feedback


def part(*columns: float) -> Feedback:
    row = torch.tensor(columns)
    return Feedback(row, (row.expand(2, len(columns)).unsqueeze(-1),))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([part(1, 2), part(3), part(4, 5)], [1, 2, 3, 4, 5]),
        ([part(1, 2), part(3, 4, 5), part(6, 7), part(8, 9, 10)], [6, 7, 8, 9, 10]),
        ([part(1, 2), part(3, 4, 5), part(6, 7)], [6, 7, 3, 4, 5]),
    ],
    ids=["slices", "two epochs", "an epoch that is cut short"],
)
def test_every_column_has_its_own_newest_feedback(
    parts: list[Feedback], expected: list[int]
) -> None:
    found = joined_feedback(parts, 5)
    assert found.priorities is not None and isinstance(found.final_state, tuple)
    assert found.priorities.tolist() == expected
    assert found.final_state[0].shape == (2, 5, 1)
    assert found.final_state[0][1, :, 0].tolist() == expected
