# SPDX-License-Identifier: Apache-2.0
"""`suite zoo` trains presets with seeds that were held out, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchbeast import suite as program
from torchbeast.envs.spec import EnvError
from torchbeast.sweep.__main__ import Swept
from torchbeast.zoo import PRESETS

CARTPOLE = [name for name in PRESETS if name.startswith("cartpole-")]


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The command lines of the sweeps that a suite ran, by their names."""
    return training(monkeypatch, lambda _: Swept([], Path(), 0, False))


def training(monkeypatch: pytest.MonkeyPatch, end: Callable[[str], Swept]) -> dict[str, list[str]]:
    commands: dict[str, list[str]] = {}

    def sweep(words: list[str], *_: object) -> Swept:
        commands[words[-1]] = words
        return end(words[-1])

    monkeypatch.setattr(program, "sweep", sweep)
    monkeypatch.setattr(program, "spaces_of", lambda *_: None)
    return commands


def test_every_preset_of_the_zoo_is_trained_with_its_number_of_held_out_seeds(
    sweeps: dict[str, list[str]], tmp_path: Path
) -> None:
    assert program.main(["zoo", "--savedir", str(tmp_path), "--parallel", "1"]) == 0
    assert [*sweeps] == [name for name, preset in PRESETS.items() if preset.seeds]
    assert "atari-impala" not in sweeps
    assert sweeps["halfcheetah-sac"][1] == "seed=101,102,103"
    assert sweeps["catch-impala"][2:] == [
        *("--preset=catch-impala", "--eval_every=50000", "--eval_episodes=100"),
        *("--savedir", str(tmp_path), "--parallel", "1"),
        *("--savedir", str(tmp_path / "zoo"), "--name", "catch-impala"),
    ]


def test_presets_are_chosen_by_patterns_of_their_names_and_by_their_algorithm(
    sweeps: dict[str, list[str]], tmp_path: Path
) -> None:
    where = ["--savedir", str(tmp_path)]
    words = ["zoo", "--only", "CartPole-*", "Pong", "--seeds", "2", "--first_seed", "7", *where]
    assert program.main(words) == 0
    assert {*sweeps} == {*CARTPOLE, "pong-impala"}  # pong is an earlier name
    assert all(command[1] == "seed=7,8" for command in sweeps.values())
    sweeps.clear()
    assert program.main(["zoo", "--only", "cartpole-*", "--algo", "PPO", *where]) == 0
    assert [*sweeps] == ["cartpole-ppo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zoo", "--only", "atari-impala"], "the zoo has no such preset"),
        (["zoo", "--only"], "the zoo has no such preset"),
        (["zoo", "--preset", "catch"], "use --only, not --preset"),
        (["classic", "--algo", "ppo", "--only", "x"], "use the suite zoo"),
        (["classic"], "classic needs --algo"),
    ],
)
def test_flags_that_do_not_suit_the_suite_are_refused(
    sweeps: dict[str, list[str]], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert program.main(words) == 2
    assert message in capsys.readouterr().err and not sweeps


def test_a_preset_that_cannot_be_trained_and_a_failed_run_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Swept([], Path(), 1, False)
    sweeps = training(monkeypatch, lambda _: failing)

    def missing(*_: object) -> None:
        raise EnvError("CartPole-v1 needs gymnasium, which is not installed: pip install it")

    monkeypatch.setattr(program, "spaces_of", missing)
    (tmp_path / "zoo" / "cartpole-ppo").mkdir(parents=True)  # it has been trained here before
    assert program.main(["zoo", "--only", "cartpole-*", "--savedir", str(tmp_path)]) == 1
    assert [*sweeps] == ["cartpole-ppo"]
    said = capsys.readouterr().out
    assert "cartpole-dqn: skipped: CartPole-v1 needs gymnasium, which is not installed" in said
    assert said.count("skipped") == len(CARTPOLE) - 1
    assert program.main(["zoo", "--only", "cartpole-ppo", "--savedir", str(tmp_path)]) == 1


def test_a_signal_stops_the_zoo_with_its_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweeps = training(monkeypatch, lambda name: Swept([], Path(), 0, name == "cartpole-ppo"))
    assert program.main(["zoo", "--only", "cartpole-*", "--savedir", str(tmp_path)]) == 0
    assert [*sweeps] == CARTPOLE[: CARTPOLE.index("cartpole-ppo") + 1] != CARTPOLE


def rows(folder: Path, states: Sequence[str], *scores: float) -> list[Any]:
    """Returns the rows of a sweep, whose runs were evaluated first with -1 and then with this."""
    for number, score in enumerate(scores):
        (folder / str(number)).mkdir()
        lines = f"step,mean_episode_return\n1,-1.0\n2,{score}\n"
        (folder / str(number) / "evaluations.csv").write_text(lines)
        (folder / str(number) / "fields.csv").write_text("step,mean_episode_return\n")
    return [
        SimpleNamespace(state=state, agent=SimpleNamespace(folder=folder / str(number)))
        for number, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "line"),
    [
        (["done"] * 4, ": evaluation return 20 ["),  # the mean of the middle half
        (["done", "done", "stopped", "waiting"], "15 ["),
        (["done", "done", "stopped", "waiting"], "], 2 of 4 runs\n"),
        (["failed"] * 4, "none of 4 runs is complete\n"),
    ],
)
def test_the_score_of_a_preset_is_that_of_the_last_evaluations_of_its_complete_runs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    states: list[str],
    line: str,
) -> None:
    swept = Swept(rows(tmp_path, states, 10.0, 20.0, 20.0, 90.0), Path(), 0, False)
    training(monkeypatch, lambda _: swept)
    program.main(["zoo", "--only", "cartpole-ppo", "--savedir", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.startswith("cartpole-ppo: ") and line in said
