# SPDX-License-Identifier: Apache-2.0
"""The end-to-end measurement runs the program with the given flags and reads its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import end_to_end
from bench.flags import BenchFlags

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--preset", "cartpole-lstm", "--num_servers", "1"],
        ["--preset", "cartpole-lstm", "--no_use_lstm"],
        ["--env", "a:b", "--observation_keys", "glyphs", "inner/map"],
        ["--entropy_cost", "0", "--megabytes_at_once", "0", "--disable_cuda", "--momentum", "0.5"],
    ],
)
def test_the_program_is_started_with_the_same_flags(words: list[str]) -> None:
    given = parse(BenchFlags, "bench", [*words, "--seconds", "1"])
    started = parse(PolyBeastFlags, "polybeast", end_to_end.arguments(given))
    before, after = flatten(given), flatten(started)
    assert set(after) == set(before) - {"seconds", "repeats", "json", "png", "hosts", "link_gbit"}
    del after["preset"]  # its settings are among the others
    assert after == {name: before[name] for name in after}


def test_a_row_counts_once_it_is_complete(tmp_path: Path) -> None:
    log = tmp_path / "logs.csv"
    assert end_to_end._newest(log).tick == -1
    for text, tick, step in (
        ("# _tick,_time,step,x\n", -1, 0),
        ("0,5.5,40,1\n", 0, 40),
        ("1,6.5,80", 0, 40),
        (",1\n", 1, 80),
    ):
        log.open("a").write(text)
        newest = end_to_end._newest(log)
        assert (newest.tick, newest.step) == (tick, step)
