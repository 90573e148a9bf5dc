# SPDX-License-Identifier: Apache-2.0
"""What the folder of a sweep lets a later command change."""

from __future__ import annotations

from pathlib import Path

import pytest
from later import later

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import RunFolder
from torchbeast.sweep.agents import agents_of, sweep_plan
from torchbeast.sweep.config import SweepConfig

SET = ("learning_rate=0.1,0.2",)
WORDS = ["--preset", "catch", "--batch_size", "4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep's folder as its first command leaves it."""
    folder = tmp_path / "mine"
    plan = sweep_plan(SweepConfig(set=SET), WORDS, folder)
    RunFolder(folder, plan.record(), []).finish(successful=True)
    return folder


def test_the_name_alone_continues_a_sweep(folder: Path) -> None:
    plan = sweep_plan(SweepConfig(name="mine"), [], folder)
    assert plan.values == {"learning_rate": ["0.1", "0.2"]} and plan.words == WORDS
    assert plan.program == "monobeast"


def test_a_continued_sweep_draws_the_same_settings_whatever_the_order_of_the_flags(
    tmp_path: Path,
) -> None:
    values = ("learning_rate=0.001:0.1", "entropy_cost=0.001:0.1")
    plan = sweep_plan(SweepConfig(set=values, trials=3), WORDS, tmp_path / "mine")
    RunFolder(tmp_path / "mine", plan.record(), []).finish(successful=True)
    again = sweep_plan(SweepConfig(name="mine"), [], tmp_path / "mine")
    first, second = plan.settings(), again.settings()
    assert [list(each.items()) for each in first] == [list(each.items()) for each in second]


@pytest.mark.parametrize(
    "more",
    [
        ["--batch_size=4"],
        later(["--total_steps", "70000"]),
        ["--checkpoint_interval", "5", "--torch_threads", "1", "--disable_cuda"],
        ["--no_use_lstm", "--preset", "catch"],
        ["--log_interval", "5", "--disable_tensorboard"],
    ],
)
def test_flags_that_leave_agents_comparable_count_instead_of_the_earlier_ones(
    folder: Path, more: list[str]
) -> None:
    words = sweep_plan(SweepConfig(set=SET), more, folder).words
    assert words == [*WORDS, *more]
    expected = flatten(parse(MonoBeastFlags, "monobeast", more))
    found = flatten(parse(MonoBeastFlags, "monobeast", words))
    for name in ("total_steps", "checkpoint_interval", "torch_threads", "disable_cuda"):
        if any(name in word for word in more):
            assert found[name] == expected[name]


def test_the_same_command_again_changes_nothing(folder: Path) -> None:
    assert sweep_plan(SweepConfig(set=SET), WORDS, folder).words == WORDS
    typed_otherwise = SweepConfig(set=("learning-rate=0.1, 0.2",))
    assert sweep_plan(typed_otherwise, WORDS, folder).words == WORDS


@pytest.mark.parametrize(
    ("config", "words", "sentence"),
    [
        (SweepConfig(), ["--batch_size", "8"], "batch_size 4, not with batch_size 8"),
        (SweepConfig(), ["--preset", "memory"], "not with"),
        (
            SweepConfig(set=("seed=1",)),
            [],
            r"--set learning_rate=0.1,0.2, not with --set seed=\.\.\.",
        ),
        (SweepConfig(shared_replay=True), [], "--shared_replay False, not with"),
        (SweepConfig(program="raybeast"), [], "--program monobeast, not with --program raybeast"),
    ],
)
def test_what_would_make_agents_differ_is_refused(
    folder: Path, config: SweepConfig, words: list[str], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        sweep_plan(config, words, folder)


def test_a_sweep_may_continue_with_other_seeds_but_not_with_other_values(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    plan = sweep_plan(SweepConfig(set=(*SET, "seed=1,2")), WORDS, folder)
    RunFolder(folder, plan.record(), []).finish(successful=True)
    grown = sweep_plan(SweepConfig(set=(*SET, "seed=3,1,2")), WORDS, folder)
    assert grown.values["seed"] == ["3", "1", "2"] and len(grown.settings()) == 6
    for others in (("learning_rate=0.1", "seed=1,2"), ("seed=1,2", *SET), SET):
        with pytest.raises(UsageError, match=r"--set learning_rate=0.1,0.2 seed=..., not with"):
            sweep_plan(SweepConfig(set=others), WORDS, folder)


def test_a_seed_that_all_agents_have_stays_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    plan = sweep_plan(SweepConfig(set=SET), [*WORDS, "--seed", "1"], folder)
    RunFolder(folder, plan.record(), []).finish(successful=True)
    with pytest.raises(UsageError, match="with seed 1, not with seed 2"):
        sweep_plan(SweepConfig(), ["--seed", "2"], folder)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run", {"env": "Catch"}, []).finish(successful=True)
    with pytest.raises(UsageError, match="is not the folder of a sweep"):
        sweep_plan(SweepConfig(set=SET), [], tmp_path / "run")


def test_a_sweep_needs_something_to_vary(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the flags to vary"):
        sweep_plan(SweepConfig(), WORDS, tmp_path / "new")


def test_a_sweep_of_trials_continues_by_its_name(tmp_path: Path) -> None:
    folder, words = tmp_path / "mine", ["--preset", "catch"]
    config = SweepConfig(set=("learning_rate=0.1:1.0",), trials=8, search="random")
    plan = sweep_plan(config, words, folder)
    RunFolder(folder, plan.record(), []).finish(successful=True)
    assert sweep_plan(SweepConfig(name="mine"), [], folder).record() == plan.record()
    with pytest.raises(UsageError, match="--trials 8, not with --trials 9"):
        sweep_plan(SweepConfig(trials=9), [], folder)


def test_a_population_keeps_its_rounds_and_a_sweep_does_not_become_one(
    folder: Path, tmp_path: Path
) -> None:
    population = tmp_path / "population"
    plan = sweep_plan(SweepConfig(set=SET, scheduler="pbt", rounds=5), WORDS, population)
    RunFolder(population, plan.record(), []).finish(successful=True)
    assert sweep_plan(SweepConfig(name="population"), [], population).config.rounds == 5
    assert sweep_plan(SweepConfig(scheduler="pbt"), [], population).config.rounds == 5
    with pytest.raises(UsageError, match="with --rounds 5, not with --rounds 4"):
        sweep_plan(SweepConfig(scheduler="pbt", rounds=4), [], population)
    with pytest.raises(UsageError, match="with --rounds None, not with --rounds 4"):
        sweep_plan(SweepConfig(scheduler="pbt", rounds=4), [], folder)


def test_a_recorded_function_gets_no_arguments_unless_this_command_names_it(tmp_path: Path) -> None:
    """Anyone may have made the folder."""
    folder = tmp_path / "theirs"
    words = ["--env", "os:system", "--env_kwargs", '{"command": "true"}']
    plan = sweep_plan(SweepConfig(set=SET), words, folder)
    assert len(agents_of(plan, folder)) == 2, "this command names it"
    RunFolder(folder, plan.record(), []).finish(successful=True)
    with pytest.raises(UsageError, match="add --env os:system"):
        agents_of(sweep_plan(SweepConfig(name="theirs"), [], folder), folder)
    assert len(agents_of(sweep_plan(SweepConfig(), words[:2], folder), folder)) == 2
