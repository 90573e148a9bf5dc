# SPDX-License-Identifier: Apache-2.0
"""Population based training: who continues from whom, and with which settings."""

from __future__ import annotations

import csv
import dataclasses
import math
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from sweeping import agent, finish, log

from torchbeast.errors import UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.log_files import read_logs
from torchbeast.sweep.__main__ import sweep
from torchbeast.sweep.pbt import CSV, Population
from torchbeast.sweep.search import moved
from torchbeast.sweep.table import AgentRow

VALUES = {"learning_rate": ["0.0001:0.01"]}
RATES = ["0.0001", "0.001", "0.002", "0.003"]


def population(folder: Path, rounds: int = 2, seed: int | None = None) -> Population:
    agents = [agent(folder, total_steps=100, learning_rate=rate) for rate in RATES]
    return Population([dataclasses.replace(each, seed=seed) for each in agents], VALUES, rounds)


def play(row: AgentRow, step: int, mean_return: float) -> None:
    """Leaves what a member's program leaves when it has reached a step."""
    log(row.agent.folder, [(step, 100, mean_return)], resumed_at=step - 1)
    (row.agent.folder / "model.tar").write_text(f"{row.agent.name} at {step}")
    row.progress = row._follower.read()
    row.state = "done" if step == 100 else "stopped"
    finish(row.agent.folder, successful=True)


def round_of(rows: list[AgentRow], returns: Mapping[int, float], step: int) -> None:
    for number, mean_return in returns.items():
        play(rows[number], step, mean_return)


def checkpoints(folder: Path) -> list[str]:
    return [(folder / f"member-0{number}" / "model.tar").read_text() for number in range(4)]


def record(folder: Path) -> list[dict[str, str]]:
    with (folder / CSV).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run(population: Population, rounds: list[Mapping[int, float]]) -> list[AgentRow]:
    rows, left = population.rows(), iter(enumerate(rounds, 1))

    def run_round() -> None:
        number, returns = next(left)
        round_of(rows, returns, 100 * number // len(rounds))

    population.run(rows, run_round, Supervisor())
    return rows


def test_the_worst_member_continues_from_the_best_and_the_others_from_themselves(
    tmp_path: Path,
) -> None:
    seen: list[str] = []
    members = population(tmp_path)
    rows = members.rows()
    rounds = iter([{0: 2.0, 1: 1.0, 2: 4.0, 3: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}])

    def run_round() -> None:
        if (tmp_path / "member-00").exists():
            seen.extend(checkpoints(tmp_path))
        round_of(rows, next(rounds), 50 if not seen else 100)

    members.run(rows, run_round, Supervisor())
    assert seen == ["member-00 at 50", "member-02 at 50", "member-02 at 50", "member-03 at 50"]
    rates = [row["learning_rate"] for row in record(tmp_path)[4:]]
    assert [rates[0], *rates[2:]] == [RATES[0], *RATES[2:]]
    assert rates[1] not in (RATES[1], RATES[2]) and 0.0001 <= float(rates[1]) <= 0.01
    assert rows[1].agent.words[-1] == f"--learning_rate={rates[1]}"
    assert [row["parent"] for row in record(tmp_path)] == ["0", "1", "2", "3", "0", "2", "2", "3"]


def test_a_member_keeps_a_seed_of_its_own_whomever_it_continues_from(tmp_path: Path) -> None:
    """Also in a later part of the sweep, if one seed was given for all."""
    members = population(tmp_path, seed=7)
    given = [[word for word in row.agent.words if "seed" in word] for row in members.rows()]
    run(members, [{0: 2.0, 1: 1.0, 2: 4.0, 3: 3.0}, dict.fromkeys(range(4), 0.0)])
    seeds = [row["seed"] for row in record(tmp_path)]
    assert len({*seeds, "7"}) == 5 and seeds == seeds[:4] * 2
    again = [row.agent.words for row in population(tmp_path).rows()]
    for number, seed in enumerate(seeds[:4]):
        assert given[number] == [f"--seed={seed}"] and f"--seed={seed}" in again[number]


def test_the_seed_and_no_name_decides_how_settings_change(tmp_path: Path) -> None:
    rates = []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        members = population(tmp_path / name, rounds=8, seed=7)
        run(members, [{0: 2.0, 1: 1.0, 2: 4.0, 3: 3.0}] * 8)
        rates.append([row["learning_rate"] for row in record(tmp_path / name)])
    assert rates[0] == rates[1]


def test_members_without_a_return_count_as_the_worst(tmp_path: Path) -> None:
    run(
        population(tmp_path), [{0: 1.0, 1: math.nan, 2: 0.0, 3: -5.0}, dict.fromkeys(range(4), 0.0)]
    )
    assert [row["parent"] for row in record(tmp_path)[4:]] == ["0", "0", "2", "3"]


def test_equal_members_stay_as_they_are(tmp_path: Path) -> None:
    run(population(tmp_path), [dict.fromkeys(range(4), 1.0)] * 2)
    assert [row["parent"] for row in record(tmp_path)[4:]] == ["0", "1", "2", "3"]


def test_a_failed_member_continues_from_the_best(tmp_path: Path) -> None:
    members = population(tmp_path)
    rows = members.rows()

    def run_round() -> None:
        round_of(rows, {0: 9.0, 1: 1.0, 2: 2.0, 3: 3.0}, 50 if members.round == 1 else 100)
        if members.round == 1:
            rows[0].state = "failed"

    members.run(rows, run_round, Supervisor())
    assert [row["parent"] for row in record(tmp_path)[4:]] == ["3", "1", "2", "3"]
    assert [row.state for row in rows] == ["done"] * 4


def test_an_interrupted_population_continues_in_its_round_with_its_settings(tmp_path: Path) -> None:
    members, supervisor = population(tmp_path), Supervisor()
    rows = members.rows()

    def run_round() -> None:
        if members.round == 2:
            play(rows[0], 100, 1.0)
            supervisor.stop("Ctrl-C")
        else:
            round_of(rows, {0: 2.0, 1: 1.0, 2: 4.0, 3: 3.0}, 50)

    members.run(rows, run_round, supervisor)
    again = population(tmp_path)
    assert again.round == 2
    assert [row.agent.settings for row in again.rows()] == [row.agent.settings for row in rows]
    assert [row.state for row in again.rows()] == ["done", "waiting", "waiting", "waiting"]


def test_a_member_that_ended_its_round_before_an_interruption_waits_for_the_others(
    tmp_path: Path,
) -> None:
    members = population(tmp_path)
    play(members.rows()[2], 60, 1.0)
    states = [row.state for row in population(tmp_path).rows()]
    assert states == ["waiting", "waiting", "stopped", "waiting"]


def test_a_member_that_was_killed_at_the_end_of_its_round_plays_it_again(tmp_path: Path) -> None:
    """Its log has reached the end, but it may not have written its checkpoint."""
    members = population(tmp_path)
    play(members.rows()[2], 60, 1.0)
    finish(tmp_path / "member-02", successful=False)
    assert [row.state for row in population(tmp_path).rows()] == ["waiting"] * 4


def test_only_episodes_since_the_copy_count_for_a_member_that_continued_from_another(
    tmp_path: Path,
) -> None:
    members = population(tmp_path, rounds=3)
    rows = members.rows()

    def run_round() -> None:
        for number, row in enumerate(rows):
            first, second = (33, 100, 9.0 * (number != 0)), (66, 150, 1.0)
            log(row.agent.folder, [first if members.round == 1 else second])
            (row.agent.folder / "model.tar").write_text("")
            row.progress, row.state = row._follower.read(), "stopped"
        if members.round == 2:
            raise KeyboardInterrupt  # ends the test

    with pytest.raises(KeyboardInterrupt):
        members.run(rows, run_round, Supervisor())
    members.note(rows)
    # Fifty of the last hundred episodes of the others ended in the first round, with 9.
    assert [float(row["mean_return"]) for row in record(tmp_path)[4:]] == [1.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("values", "value", "up", "down"),
    [
        (["0.0001:0.01"], "0.001", "0.001585", "0.000631"),  # 10 ** (2 / 10)
        (["0.0001:0.01"], "0.009", "0.01", "0.005679"),
        (["-1:1.0"], "0.5", "0.7", "0.3"),
        (["1:5"], "3", "4", "2"),
        (["1:5"], "5", "5", "4"),
        (["0.9", "0.99", "0.999"], "0.99", "0.999", "0.9"),
        (["true", "false"], "true", "false", "true"),
    ],
)
def test_settings_move_by_a_tenth_of_their_range_or_a_place_in_their_list(
    values: list[str], value: str, up: str, down: str
) -> None:
    assert (moved(values, value, 1), moved(values, value, -1)) == (up, down)


def test_the_worst_quarter_continues_from_the_best_quarter(tmp_path: Path) -> None:
    agents = [agent(tmp_path, total_steps=100, learning_rate=f"0.00{n}") for n in range(1, 9)]
    last = dict.fromkeys(range(8), 0.0)
    run(Population(agents, VALUES, 2), [{number: float(number) for number in range(8)}, last])
    parents = [int(row["parent"]) for row in record(tmp_path)[8:]]
    assert set(parents[:2]) <= {6, 7} and parents[2:] == list(range(2, 8))


def test_a_member_keeps_the_schedule_of_its_parent(tmp_path: Path) -> None:
    for row in population(tmp_path).rows():
        assert "--no_restart_schedules" in row.agent.words


def test_a_quarter_of_the_changed_settings_is_drawn_anew(tmp_path: Path) -> None:
    members, rng = population(tmp_path), random.Random(0)
    near = {moved(VALUES["learning_rate"], "0.001", way) for way in (-1, 1)}
    found = [members._explored({"learning_rate": "0.001"}, rng) for _ in range(1000)]
    anew = sum(values["learning_rate"] not in near for values in found)
    assert 190 < anew < 310  # 250, and four standard deviations


def test_no_move_is_rounded_out_of_its_range() -> None:
    assert moved(["0.5:0.99999"], "0.99", 1) == "0.99999"


def test_settings_that_cannot_change_and_few_members_are_refused(tmp_path: Path) -> None:
    agents = [agent(tmp_path, seed=str(seed)) for seed in range(4)]
    with pytest.raises(UsageError, match="seed cannot change"):
        Population(agents, {"seed": ["0", "1", "2", "3"]}, 2)
    for key in ("shared_body", "buffer_size", "preset", "frame_skip", "reward_clipping"):
        with pytest.raises(UsageError, match=f"{key} cannot change"):
            Population(agents, {key: ["1", "2"]}, 2)
    with pytest.raises(UsageError, match="at least 4 agents"):
        Population(agents[:3], VALUES, 2)
    few = [dataclasses.replace(each, total_steps=9) for each in agents]
    with pytest.raises(UsageError, match="--rounds 10 is more than --total_steps 9"):
        Population(few, VALUES, 10)
    for words in (["--disable_checkpoint"], ["--disable_checkpoint=true"]):
        without = [dataclasses.replace(each, words=words) for each in agents]
        with pytest.raises(UsageError, match="remove --disable_checkpoint"):
            Population(without, VALUES, 2)
    late = ["--algo", "dqn", "--learn_start", "60", "--total_steps", "100"]
    with pytest.raises(UsageError, match="never begins after --learn_start 60 in rounds of 50"):
        Population([dataclasses.replace(each, words=late) for each in agents], VALUES, 2)
    kept = [*late, "--checkpoint_replay"]  # the next round continues with the replay
    Population([dataclasses.replace(each, words=kept) for each in agents], VALUES, 2)


def test_a_failure_in_a_round_is_told_before_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = population(tmp_path)
    rows = members.rows()

    def run_round() -> None:
        round_of(rows, {0: 9.0, 1: 1.0, 2: 2.0, 3: 3.0}, 50 if members.round == 1 else 100)
        if members.round == 1:
            rows[0].state, rows[0].report = "failed", {"why": "ValueError: no"}

    members.run(rows, run_round, Supervisor())
    assert "member-00 failed: ValueError: no" in capsys.readouterr().err


@pytest.mark.long
def test_a_changed_learning_rate_is_the_one_in_use(tmp_path: Path) -> None:
    """The rate in the log comes from the optimiser; by default it falls linearly to 0."""
    command = ["--set", "learning_rate=0.0003:0.03", "--trials", "4", "--scheduler", "pbt"]
    run_of = ["--preset", "catch", "--total_steps", "4000", "--rounds", "2", "--seed", "1"]
    swept = sweep([*command, *run_of, "--savedir", str(tmp_path), "--name", "p"])
    assert swept.exit_code == 0
    folder = swept.folder
    copied = [row for row in record(folder) if row["parent"] != row["member"]]
    assert len(copied) == 1
    began = int(record(folder)[int(copied[0]["parent"])]["step"])
    assert began == 2_080, "the first multiple of 160, a batch"
    rows = [row for row in read_logs(folder / f"member-0{copied[0]['member']}")][-10:]
    steps_before = np.array([row["step"] for row in rows]) - 160
    assert steps_before[0] > began
    expected = float(copied[0]["learning_rate"]) * (1 - steps_before / 4_000)
    np.testing.assert_allclose([row["learning_rate"] for row in rows], expected, rtol=1e-5)
