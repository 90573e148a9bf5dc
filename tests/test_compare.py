# SPDX-License-Identifier: Apache-2.0
"""What `compare` says about two sets of runs whose scores are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from torchbeast import compare, plot
from torchbeast import suite as program
from torchbeast.errors import UsageError
from torchbeast.reporting.estimates import Estimate
from torchbeast.suite import SUITES, Suite, suite
from torchbeast.sweep.__main__ import Swept
from torchbeast.zoo import PRESETS


def run(folder: Path, score: float, steps: int = 1000, **settings: object) -> None:
    """Writes the files of a run whose 200 episodes end with 100 of this score."""
    folder.mkdir(parents=True)
    args = {"env": "Catch", "env_kwargs": {}, "learning_rate": 0.1, "seed": 1, **settings}
    (folder / "meta.json").write_text(json.dumps({"args": args, "argv": ["monobeast"]}))
    columns = "_tick,_time,step,mean_episode_return,episodes"
    (folder / "fields.csv").write_text(columns + "\n")
    rows = [f"0,1.0,{steps // 2},-50.0,100", f"1,2.0,{steps},{score},200"]
    (folder / "logs.csv").write_text(f"# {columns}\n" + "".join(f"{row}\n" for row in rows))


def runs(parent: Path, scores: Sequence[float], **settings: object) -> str:
    for seed, score in enumerate(scores):
        run(parent / f"{settings.get('env', 'Catch')}-{seed}", score, seed=seed, **settings)
    return str(parent)


def said(capsys: pytest.CaptureFixture[str], *sets: str, **flags: object) -> str:
    assert compare.run(compare.CompareFlags(runs=sets, **flags)) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_a_set_that_is_clearly_better_is_called_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = runs(tmp_path / "a", [5.0, 6.0, 7.0, 8.0, 5.5])
    worse = runs(tmp_path / "b", [1.0, 2.0, 3.0, 2.5, 5.2])
    out = said(capsys, better, worse, output=(tmp_path / "out.json",))
    assert "A is better: one of its runs beats one of B with probability 0.96." in out
    written = json.loads((tmp_path / "out.json").read_text())
    of_catch = written["tasks"]["Catch"]
    assert written["sets"]["a"]["Catch"] == [5.0, 6.0, 7.0, 8.0, 5.5]
    assert of_catch["iqm"][0]["value"] == pytest.approx((5.5 + 6 + 7) / 3)
    assert of_catch["difference"]["value"] == pytest.approx((5.5 + 6 + 7 - 2 - 2.5 - 3) / 3)
    assert of_catch["improvement"]["value"] == 24 / 25
    for each in (*of_catch["iqm"], of_catch["difference"], of_catch["improvement"]):
        assert each["low"] < each["value"] < each["high"]
    assert of_catch["difference"]["low"] > 0 and of_catch["improvement"]["low"] > 0.5
    assert "B is better" in said(capsys, worse, better)


def test_an_agent_of_many_tasks_is_compared_with_specialists_task_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        folder = tmp_path / "a" / f"{seed}"
        run(folder, 0.5, env="Catch,Memory", seed=seed)
        names = "step,mean_episode_return,episodes,mean_return_Catch,mean_return_Memory"
        (folder / "fields.csv").write_text(f"{names}\n")
        (folder / "logs.csv").write_text(f"# {names}\n1000,0.5,200,{5.0 + seed},\n")
    specialists = tmp_path / "b"
    runs(specialists, [1.0, 2.0])
    runs(specialists, [3.0], env="Memory")
    run(tmp_path / "c", 0.5, env="partial(make, 1)")  # of older code
    assert list(compare.read(str(tmp_path / "c")).tasks) == ["partial(make, 1)"]
    found = compare.read(str(tmp_path / "a"))
    assert list(found.tasks) == ["Catch"], "no episode of Memory has ended"
    assert found.scores("Catch").tolist() == [5.0, 6.0]
    curves = [plot.curve(run.folder, column=run.column) for run in found.tasks["Catch"]]
    assert curves == [[(1000, 5.0)], [(1000, 6.0)]]
    said(capsys, str(tmp_path / "a"), str(specialists))


def test_large_scores_have_no_exponent_and_brackets_of_a_task_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"flags": [True]}
    runs(tmp_path / "a", [12345.0, 12345.0], env_kwargs=kwargs)
    runs(tmp_path / "b", [10000.0, 10000.0], env_kwargs=kwargs)
    out = said(capsys, str(tmp_path / "a"), str(tmp_path / "b"))
    assert "12,345 [12,345, 12,345]" in out and "+2,345 [" in out and '{"flags": [true]}' in out


def test_equal_scores_need_no_more_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = [runs(tmp_path / name, [500.0] * 5) for name in "ab"]
    assert "No difference: all runs of a task have the same score." in said(capsys, *alike)


def test_opposite_differences_are_not_called_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, scores in (("a", (1.0, 0.0)), ("b", (0.0, 1.0))):
        for env, score in zip(("Catch", "Memory"), scores, strict=True):
            runs(tmp_path / name, [score] * 5, env=env)
    assert "Inconclusive" in said(capsys, str(tmp_path / "a"), str(tmp_path / "b"))


def test_few_runs_are_never_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better, worse = runs(tmp_path / "a", [5.0, 6.0, 7.0]), runs(tmp_path / "b", [1.0, 2.0, 3.0])
    out = said(capsys, better, worse)
    assert "Inconclusive: 3 runs per task are not enough" in out


def test_an_interval_across_one_half_tells_nothing_with_any_number_of_runs() -> None:
    for count in (3, 5, 100):
        told = compare.verdict(Estimate(0.72, 0.28, 1.0), count)
        assert "Inconclusive: the interval" in told
    assert "about 2 more seeds" in compare.verdict(Estimate(0.9, 0.45, 1.0), 3), "five at least"


def test_sets_with_the_same_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = runs(tmp_path / "a" / "mine", [1.0, 2.0])
    two = runs(tmp_path / "b" / "mine", [3.0, 4.0])
    out = said(capsys, one, f"{two}/*", output=(tmp_path / "x.json",))
    assert "A: a/mine\nB: b/mine" in out
    written = json.loads((tmp_path / "x.json").read_text())["sets"]
    assert {name: each["Catch"] for name, each in written.items()} == {
        "a/mine": [1.0, 2.0],
        "b/mine": [3.0, 4.0],
    }
    with pytest.raises(UsageError, match="both sets are .*mine: use two different sets"):
        compare.run(compare.CompareFlags(runs=(one, f"{one}/")))


@pytest.mark.parametrize(
    ("improvement", "sentence"),
    [
        (Estimate(0.6, 0.4, 0.8), "about 30 more seeds"),  # the interval must shrink to half
        (Estimate(0.78, 0.5, 0.97), "about 1 more seed of each"),
        (Estimate(0.45, 0.25, 0.65), "more than 100 more seeds"),
        (Estimate(0.5, 0.3, 0.7), "more than 100 more seeds"),
    ],
)
def test_seeds_that_cannot_tell_are_said_to_and_how_many_would(
    improvement: Estimate, sentence: str
) -> None:
    told = compare.verdict(improvement, 10)
    assert "Inconclusive: the interval" in told and sentence in told


def test_tasks_count_equally_on_one_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for env, factor in (("Catch", 1.0), ("Memory", 1000.0)):
        runs(tmp_path / "a", factor * np.array([0.0, 0.0, 1.0, 1.0, 1.0]), env=env)
        runs(tmp_path / "b", factor * np.array([0.0, 0.0, 0.0, 1.0, 1.0]), env=env)
    out = said(capsys, str(tmp_path / "a"), str(tmp_path / "b"), output=(tmp_path / "x.json",))
    together = json.loads((tmp_path / "x.json").read_text())["together"]
    assert [each["value"] for each in together["iqm"]] == [
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    ]
    assert out.count("Memory") == 1


def test_one_set_is_described_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, runs(tmp_path / "a", [1.0, 2.0, 3.0, 4.0]))
    assert "2.5 [" in out and "Intervals are too narrow" in out and "P(A > B)" not in out


def test_a_link_to_a_run_does_not_count_it_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs(tmp_path / "a", [1.0, 2.0])
    (tmp_path / "a" / "latest").symlink_to(tmp_path / "a" / "Catch-1")
    assert len(compare.read(folder).tasks["Catch"]) == 2
    assert len(compare.read(f"{folder}/Catch-*").tasks["Catch"]) == 2


def test_sets_with_a_common_run_are_refused(tmp_path: Path) -> None:
    both = runs(tmp_path / "a", [1.0, 2.0])
    with pytest.raises(UsageError, match="Catch-1 is in both sets"):
        compare.run(compare.CompareFlags(runs=(both, f"{both}/*-1")))


def test_runs_of_different_lengths_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs(tmp_path / "a", [1.0, 2.0])
    run(tmp_path / "a" / "long", 3.0, steps=5000, seed=7)
    assert "end between step 1,000 and 5,000" in said(capsys, folder)


def test_runs_with_other_settings_are_refused(tmp_path: Path) -> None:
    folder = runs(tmp_path / "a", [1.0, 2.0])
    run(tmp_path / "a" / "z", 3.0, learning_rate=0.2)
    with pytest.raises(UsageError, match=r"has learning_rate 0.2, and another run 0.1: choose"):
        compare.read(folder)


def test_runs_without_an_episode_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", 1.0)
    log = tmp_path / "a" / "logs.csv"
    log.write_text(log.read_text().splitlines(keepends=True)[0])  # the heading alone
    with pytest.raises(UsageError, match="no episode has ended in .*a yet"):
        compare.run(compare.CompareFlags(runs=(str(tmp_path / "a"),)))


def test_sets_without_a_common_environment_are_refused(tmp_path: Path) -> None:
    sets = runs(tmp_path / "a", [1.0]), runs(tmp_path / "b", [1.0], env="Memory")
    with pytest.raises(UsageError, match="no environment in common: Catch and Memory"):
        compare.run(compare.CompareFlags(runs=sets))


@pytest.mark.parametrize(
    ("sets", "message"),
    [((), "expected one or two sets of runs, got 0"), (("nowhere",), "no run found in nowhere")],
)
def test_no_runs_are_refused(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare.run(compare.CompareFlags(runs=sets))


def test_the_figure_has_a_panel_for_each_task_and_the_profile(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for env in ("Catch", "Memory"):
        runs(tmp_path / "a", [1.0, 2.0], env=env)
        runs(tmp_path / "b", [0.0, 1.0, 3.0], env=env)
    image = tmp_path / "two.svg"
    sets = str(tmp_path / "a"), str(tmp_path / "b")
    compare.run(compare.CompareFlags(runs=sets, output=(image,)))
    assert image.read_text().count('id="axes_') == 3


def test_runs_of_a_set_may_differ_in_what_a_continued_sweep_may_change(tmp_path: Path) -> None:
    run(tmp_path / "1", 1.0, seed=1, torch_threads=None)
    run(tmp_path / "2", 2.0, seed=2, torch_threads=1, episodes_for_avg=20)
    assert [*compare.read(str(tmp_path)).scores("Catch")] == [1.0, 2.0]


# --- suites


def test_a_suite_varies_its_environments_or_the_presets_of_its_tasks() -> None:
    presets = {"ppo": ("a-ppo",), "dqn": ("a-dqn", "b-dqn")}
    mine = Suite(presets=presets, envs=("A-v1", "B-v1"))
    assert mine.words("ppo", None) == ["env=A-v1,B-v1", "--preset=a-ppo"]
    assert mine.words("dqn", None) == ["preset=a-dqn,b-dqn"]
    assert mine.words("dqn", "catch") == ["env=A-v1,B-v1", "--preset=catch"]
    assert Suite(presets=presets).words("ppo", None) == ["--preset=a-ppo"]


def test_a_family_of_presets_is_a_suite_without_variants_and_what_the_zoo_does_not_train() -> None:
    classic, atari = suite("Classic").presets["impala"], suite("atari").presets["impala"]
    assert {"cartpole-impala", "pendulum-impala"} <= {*classic} and "pong-impala" in atari
    assert PRESETS["cartpole-impala-lstm"].family == "classic" and PRESETS["atari-impala"]
    assert "cartpole-impala-lstm" not in classic and "atari-impala" not in atari
    (games,) = (word for word in suite("minatar").words("x", "catch") if word.startswith("env="))
    assert games.startswith("env=MinAtar/Asterix-v1,MinAtar/Breakout-v1,")


def test_a_suite_of_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"envs": ["A-v1", "B-v1"], "presets": {"ppo": ["cartpole-ppo"]}}')
    assert suite(str(file)).words("ppo", None) == ["env=A-v1,B-v1", "--preset=cartpole-ppo"]
    file.write_text('{"presets": {"PPO": ["cartpole-ppo"]}}')
    assert suite(str(file)).words("ppo", None) == ["--preset=cartpole-ppo"]


@pytest.mark.parametrize(
    "text",
    [
        '{"envs": ["A-v1"]}',
        '{"presets": {"ppo": "cartpole-ppo"}}',
        '{"presets": {}, "envs": "A-v1"}',
    ],
)
def test_a_suite_of_a_file_that_lacks_lists_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(UsageError, match=r"must contain .*presets"):
        suite(str(tmp_path / "mine.json"))


def test_a_suite_of_which_a_part_was_extended_has_no_report_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(tmp_path / "a", [1.0], total_steps=1000)
    run(tmp_path / "a" / "longer", 2.0, seed=7, total_steps=2000)
    row = SimpleNamespace(progress=SimpleNamespace(mean_return=1.0))
    program._report([row], tmp_path / "a")  # type: ignore[list-item]
    assert "No comparison: runs of a set may differ only" in capsys.readouterr().out


def test_what_a_suite_does_not_have_is_named() -> None:
    with pytest.raises(UsageError, match=r"no suite 'mintar'.*did you mean minatar"):
        suite("mintar")
    with pytest.raises(UsageError, match=r"has no settings for sac, only for impala, ppo"):
        suite("minatar").words("sac", None)


def test_a_suite_is_a_sweep_over_its_tasks_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def sweep(words: list[str], *_: object) -> Swept:
        called.append(words)
        return Swept([], Path(), 0, False)

    monkeypatch.setattr(program, "sweep", sweep)
    words = ["toy", "--algo", "dqn", "--seeds", "3", "--first_seed", "11", "--parallel", "2"]
    assert program.main(words) == 0
    expected = ["--set", "seed=11,12,13", "--preset=bitflip-dqn", "--name", "toy-dqn"]
    assert called == [[*expected, "--parallel", "2"]]
    assert program.main(["box2d", "--preset", "catch", "--algo", "laser", "--name", "x"]) == 0
    envs = "env=LunarLander-v3,LunarLanderContinuous-v3"
    assert called[1][2:] == [envs, "--preset=catch", "--algo=laser", "--name", "x"]
    assert suite("classic").words("dqn", "catch")[0] == "env=CartPole-v1,Acrobot-v1,MountainCar-v0"


def test_a_suite_does_not_vary_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "sweep", None)
    for words in (["toy", "--algo", "dqn"], ["zoo", "--only", "catch-*"]):
        assert program.main([*words, "--set", "learning_rate=0.1,0.2"]) == 2
        assert "a suite varies only tasks and seeds" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, each in SUITES.items() if each.envs])
def test_a_suite_with_environments_trains_each_of_them_with_every_algorithm(name: str) -> None:
    for algo in SUITES[name].presets:
        first, *_ = SUITES[name].words(algo, None)
        kind, _, values = first.partition("=")
        trained = values.split(",")
        if kind == "preset":
            trained = [PRESETS[preset].task[0] for preset in trained]
        assert sorted(trained) == sorted(SUITES[name].envs), algo


def test_a_report_is_of_the_suites_own_folder_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]"
    runs(folder, [1.0, 2.0])
    program._report([SimpleNamespace(progress=SimpleNamespace(mean_return=1.0))], folder)  # type: ignore[list-item]
    assert json.loads((folder / "suite.json").read_text())


def test_the_presets_of_all_suites_exist() -> None:
    named = {name for each in SUITES.values() for names in each.presets.values() for name in names}
    assert named <= PRESETS.keys()


def test_a_score_is_of_a_hundred_episodes_whatever_the_run_shows(tmp_path: Path) -> None:
    run(tmp_path / "a" / "1", 5.0, episodes_for_avg=200)
    columns = "_tick,_time,step,mean_episode_return,mean_return,episodes"
    (tmp_path / "a" / "1" / "fields.csv").write_text(columns + "\n")
    rows = "0,1.0,500,-50.0,-50.0,100\n1,2.0,1000,5.0,-22.5,200\n"
    (tmp_path / "a" / "1" / "logs.csv").write_text(f"# {columns}\n{rows}")
    assert [*compare.read(str(tmp_path / "a")).scores("Catch")] == [5.0]
