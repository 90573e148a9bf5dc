# SPDX-License-Identifier: Apache-2.0
"""Observations that are dicts, in whole programs."""

from __future__ import annotations

import pytest
from programs import Workshop

PROGRAMS = {"monobeast": ["--num_processes", "1"], "polybeast": ["--num_servers", "1"]}
SMALL = [
    "--num_actors",
    "2",
    "--batch_size",
    "4",
    "--unroll_length",
    "10",
    "--torch_threads",
    "1",
    "--xpid",
    "a",
]
IN_PIECES = ["--megabytes_at_once", "0.001"]  # a piece for each column


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_image_and_a_number_are_learnt_from_in_pieces_over_time_limits(
    workshop: Workshop, program: str
) -> None:
    args = [*SMALL, *PROGRAMS[program], *IN_PIECES, "--total_steps", "400"]
    code, said = workshop.run(program, "--env", "environments:Mixed", *args)
    assert code == 0, said
    assert "mean return 10.00" in said, said
    workshop.assert_nothing_is_left()
