# SPDX-License-Identifier: Apache-2.0
"""The parts of the settings that learners have which share the streams of all servers."""

from __future__ import annotations

import pytest

from torchbeast.errors import UsageError
from torchbeast.servers.config import PipelineConfig


@pytest.mark.parametrize("needed", range(1, 8))
@pytest.mark.parametrize("shares", [(2, 2), (2, 3), (3, 3, 1)])
def test_learners_together_never_go_on_with_fewer_streams_than_asked(
    needed: int, shares: tuple[int, ...]
) -> None:
    """No part is more than the streams of its learner."""
    count, config = sum(shares), PipelineConfig(min_streams=needed)
    if needed > count:
        with pytest.raises(UsageError, match=f"min_streams {needed} is .* the {count} streams"):
            config.check_enough(count)
        return
    parts = [config.share(len(shares), own, count).min_streams or 0 for own in shares]
    assert needed <= sum(parts) < needed + len(shares)
    assert all(1 <= part <= own for part, own in zip(parts, shares, strict=True))


def test_without_a_number_each_learner_needs_half_of_its_streams() -> None:
    assert PipelineConfig().share(2, 3, 6).min_streams is None
