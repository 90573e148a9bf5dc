# SPDX-License-Identifier: Apache-2.0
"""What torchrun's environment variables say, and the programs that cannot run in ranks."""

from __future__ import annotations

import importlib

import pytest

from torchbeast.errors import UsageError
from torchbeast.fleets.system import Launch, available_cores, launched

TWO_OF_FOUR = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("alone", [{}, {"WORLD_SIZE": ""}, TWO_OF_FOUR | {"WORLD_SIZE": "1"}])
def test_one_process_is_alone_with_torchrun_or_without(alone: dict[str, str]) -> None:
    assert launched(alone) is None


def test_a_process_of_several_knows_its_place() -> None:
    assert launched(TWO_OF_FOUR) == Launch(rank=3, size=4, local_rank=1, local_size=2)


def test_a_world_without_a_place_to_meet_is_refused() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE is 2, but RANK, MASTER_PORT is not set"):
        launched({"WORLD_SIZE": "2", "MASTER_ADDR": "a"})


def test_learners_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = available_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_cores() == max(1, cores // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10 * cores))
    assert available_cores() == 1


@pytest.mark.parametrize("program", ["monobeast", "polybeast", "raybeast", "polybeast_env"])
def test_other_programs_name_the_one_that_runs_in_ranks(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in TWO_OF_FOUR.items():
        monkeypatch.setenv(name, value)
    main = importlib.import_module(f"torchbeast.{program}").main
    assert main(["--env", "Catch"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{program}: {program} runs in one process, but 4 were started")
    assert "-m torchbeast.polybeast_learner" in said
