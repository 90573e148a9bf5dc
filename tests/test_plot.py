# SPDX-License-Identifier: Apache-2.0
"""Curves are drawn from logs.csv; a folder without one is refused with a message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from torchbeast import plot
from torchbeast.errors import UsageError
from torchbeast.reporting.log_files import LogFiles
from torchbeast.reporting.run_folder import new_name


def write_run(folder: Path, returns: list[float]) -> Path:
    folder.mkdir()
    files = LogFiles(folder)
    for i, value in enumerate(returns):
        files.write(10 * (i + 1), {"mean_episode_return": value})
    files.close()
    return folder


def test_a_curve_is_the_mean_of_the_last_updates_in_which_episodes_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1.0, float("nan"), 3.0])
    assert plot.curve(run) == [(10.0, 1.0), (30.0, 2.0)]


def test_a_curve_forgets_updates_as_soon_as_later_ones_have_a_hundred_episodes(
    tmp_path: Path,
) -> None:
    """Environments that end together would otherwise drag a curve behind by many episodes."""
    (run := tmp_path / "a").mkdir()
    files = LogFiles(run)
    for number, value in enumerate([1.0, 2.0, 3.0, 4.0], 1):
        files.write(number, {"mean_episode_return": value, "episodes": 64 * number})
    files.close()
    assert plot.curve(run) == [(1.0, 1.0), (2.0, 1.5), (3.0, 2.5), (4.0, 3.5)]


def test_every_episode_counts_as_much_in_a_curve(tmp_path: Path) -> None:
    (run := tmp_path / "a").mkdir()
    files = LogFiles(run)
    files.write(1, {"mean_episode_return": 10.0, "episodes": 10})
    files.write(2, {"mean_episode_return": 500.0, "episodes": 11})
    files.close()
    assert plot.curve(run)[-1] == (2.0, pytest.approx((10 * 10 + 500) / 11))


def test_evaluations_are_drawn_as_they_are_on_the_clock_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "logs.csv").write_text("step,_time,mean_episode_return\n10,5000,1\n")
    (file := tmp_path / "evaluations.csv").write_text(
        "_time,step,num_episodes,mean_episode_return\n5600,10,9,0\n5660,20,9,500\n"
    )
    assert plot.curve(file, clock=True) == [(10.0, 0.0), (11.0, 500.0)]


def test_steps_before_a_run_went_back_are_not_drawn(tmp_path: Path) -> None:
    rows = [(100, 1), (300, 2), (400, 3), (310, 4)]
    text = "".join(f"{step},9,{value}\n" for step, value in rows)
    (file := tmp_path / "e.csv").write_text(f"step,num_episodes,mean_episode_return\n{text}")
    assert plot.curve(file) == [(100.0, 1.0), (300.0, 2.0), (310.0, 4.0)]


def test_a_folder_without_a_run_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no logs.csv$"):
        plot.curve(tmp_path)
    write_run(tmp_path / "a", [1.0])  # as in the folder of a sweep
    with pytest.raises(UsageError, match=f"it has no logs.csv; .* give {tmp_path}/\\*$"):
        plot.curve(tmp_path)


def test_a_run_without_an_ended_episode_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no episode has ended"):
        plot.group_runs([write_run(tmp_path / "a", [float("nan")])])


def test_other_columns_are_drawn_and_unknown_ones_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run := tmp_path / "a").mkdir()
    files = LogFiles(run)
    files.write(10, {"mean_episode_return": float("nan"), "entropy": 1.5})
    files.close()
    assert plot.group_runs([run], column="entropy")[0].curves == {run: [(10.0, 1.5)]}
    with pytest.raises(UsageError, match="no values in a column entropie; did you mean entropy"):
        plot.group_runs([run], column="entropie")
    with pytest.raises(UsageError, match="column tropy; did you mean entropy"):
        plot.group_runs([run], column="tropy")
    assert not capsys.readouterr().err, "one message is enough"


def test_no_run_at_all_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main([]) == 2
    assert "plot: " in capsys.readouterr().err


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.main([str(write_run(tmp_path / "a", [1.0]))]) == 2
    assert "pip install 'torchbeast[plot]'" in capsys.readouterr().err


def test_a_png_and_an_svg_of_several_runs_are_written_by_one_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(write_run(tmp_path / name, [1.0, 2.0])) for name in "ab"]
    images = [tmp_path / "curve.png", tmp_path / "curve.svg"]
    assert plot.main([*runs, "--output", *map(str, images)]) == 0
    assert images[0].read_bytes().startswith(b"\x89PNG") and "<svg" in images[1].read_text()


def test_nothing_is_drawn_outside_the_range_of_the_runs(tmp_path: Path) -> None:
    """Returns of at most 500 never look like more, and every run is drawn to its own end."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    best, worst = [(0.0, 10.0), (50.0, 500.0)], [(0.0, 9.0), (100.0, 300.0)]
    group = plot.RunGroup({}, {Path("a"): best, Path("b"): worst})
    axes = figure.subplots()
    plot.draw(axes, [("both", group)], "CartPole")
    drawn = [np.array(line.get_data()) for line in axes.get_lines()]
    assert all(y.min() >= 9 and y.max() <= 500 for _, y in drawn)
    assert sorted(x.max() for x, _ in drawn) == [50, 50, 100] and not axes.collections


def write_kind(folder: Path, program: str, points: list[tuple[int, float]], **args: object) -> Path:
    """Writes a run of a program with these flags; each point is a row."""
    folder.mkdir()
    meta = {"args": {"env": "Catch", **args}, "argv": [f"/x/torchbeast/{program}.py"]}
    (folder / "meta.json").write_text(json.dumps(meta))
    files = LogFiles(folder)
    for step, value in points:
        files.write(step, {"mean_episode_return": value})
    files.close()
    return folder


def flat(value: float, last: int = 100) -> list[tuple[int, float]]:
    return [(step, value) for step in range(10, last + 10, 10)]


def seeds(tmp_path: Path, values: list[float], program: str = "monobeast") -> list[Path]:
    """Writes runs that differ only in seed, name and folder."""
    return [
        write_kind(
            tmp_path / f"{program}-{i}", program, flat(value), seed=i, xpid=f"x{i}", savedir=f"/{i}"
        )
        for i, value in enumerate(values)
    ]


def test_runs_that_differ_only_in_seed_are_one_line_their_mean(tmp_path: Path) -> None:
    (group,) = plot.group_runs(seeds(tmp_path, [1.0, 2.0, 6.0]))
    steps, curves = plot.on_one_grid(group.curves.values())
    assert steps[0] == 10 and steps[-1] == 100 and (curves.mean(0) == 3).all()


def test_curves_with_points_at_different_steps_are_interpolated(tmp_path: Path) -> None:
    """One curve rises from 0 to 100 over 100 steps, the other to 200 with a point at step 37."""
    group = plot.RunGroup(
        {}, {Path("a"): [(0, 0.0), (100, 100.0)], Path("b"): [(0, 0.0), (37, 74.0), (100, 200.0)]}
    )
    steps, curves = plot.on_one_grid(group.curves.values())
    assert np.allclose(curves.mean(0), 1.5 * steps) and len(steps) > 100


def test_no_mean_is_taken_over_the_runs_that_are_left(tmp_path: Path) -> None:
    """The best run of three ends first, and the line with it."""
    early, late = [(0.0, 1.0), (10.0, 1.0), (60.0, 9.0)], [(20.0, 1.0), (50.0, 1.0), (100.0, 1.0)]
    group = plot.RunGroup({}, {Path("a"): early, Path("b"): late, Path("c"): late})
    steps, curves = plot.on_one_grid(group.curves.values())
    assert (steps[0], steps[-1]) == (20, 60)
    assert np.allclose(curves[:, -1], [9, 1, 1])


def test_runs_without_a_step_in_common_have_no_mean(tmp_path: Path) -> None:
    apart = {Path("a"): [(0.0, 1.0), (10.0, 1.0)], Path("b"): [(20.0, 3.0), (60.0, 3.0)]}
    steps, curves = plot.on_one_grid(apart.values())
    assert (steps.shape, curves.shape) == ((0,), (2, 0))


def test_with_a_clock_a_run_is_drawn_against_minutes_since_it_began(tmp_path: Path) -> None:
    kept, run = tmp_path / "monobeast-1.csv", tmp_path / "logs.csv"
    kept.write_text("step,seconds,mean_episode_return\n10,30,1\n20,90,3\n")
    run.write_text("step,_time,mean_episode_return\n10,5000,1\n20,5060,3\n")
    assert plot.curve(kept, clock=True) == [(0.5, 1.0), (1.5, 2.0)]
    assert plot.curve(tmp_path, clock=True) == [(0.0, 1.0), (1.0, 2.0)]


def test_programs_and_flags_that_differ_name_the_lines(tmp_path: Path) -> None:
    mono = seeds(tmp_path, [1.0, 2.0], "monobeast")
    poly = seeds(tmp_path, [1.0], "polybeast")
    assert plot.labels(plot.group_runs(mono + poly)) == ["monobeast (n=2)", "polybeast (n=1)"]
    flags = [{"use_lstm": lstm, "learning_rate": rate} for lstm, rate in ((True, 1), (False, 2))]
    runs = [
        write_kind(tmp_path / new_name(str(i)), "monobeast", flat(1.0), **each)
        for i, each in enumerate(flags)
    ]
    assert plot.labels(plot.group_runs(runs)) == [
        "use_lstm True, learning_rate 1 (n=1)",
        "use_lstm False, learning_rate 2 (n=1)",
    ]


def test_runs_of_a_shared_replay_are_one_line_whatever_its_address_was(tmp_path: Path) -> None:
    runs = [
        write_kind(tmp_path / f"s{i}", "monobeast", flat(1.0), replay_service=address)
        for i, address in enumerate(("/run/1", "ray:2", None))
    ]
    assert plot.labels(plot.group_runs(runs)) == [
        "shared_replay True (n=2)",
        "shared_replay False (n=1)",
    ]


def test_runs_of_self_play_are_one_line_whatever_their_folders_of_versions(tmp_path: Path) -> None:
    runs = [
        write_kind(tmp_path / f"s{i}", "monobeast", flat(1.0), selfplay=pool)
        for i, pool in enumerate(("/versions/1", "/versions/2", None))
    ]
    assert plot.labels(plot.group_runs(runs)) == ["selfplay True (n=2)", "selfplay None (n=1)"]


def test_runs_whose_hosts_dial_in_are_one_line_however_many_were_there_first(
    tmp_path: Path,
) -> None:
    runs = [
        write_kind(tmp_path / f"s{n}", "polybeast_learner", flat(1.0), listen="a:1", num_envs=n)
        for n in (64, 128)
    ]
    assert len(plot.group_runs(runs)) == 1


def test_flags_that_only_one_program_has_are_not_in_the_label(tmp_path: Path) -> None:
    mono = write_kind(tmp_path / new_name("m"), "monobeast", flat(1.0), num_workers=2)
    poly = write_kind(tmp_path / new_name("p"), "polybeast", flat(1.0), num_servers=2)
    assert plot.labels(plot.group_runs([mono, poly])) == ["monobeast (n=1)", "polybeast (n=1)"]


def test_single_runs_are_labelled_with_the_names_that_the_user_gave_them(tmp_path: Path) -> None:
    runs = [
        write_kind(tmp_path / f"rate-{rate}", "monobeast", flat(1.0), learning_rate=rate)
        for rate in (1, 2)
    ]
    assert plot.labels(plot.group_runs(runs)) == ["rate-1 (n=1)", "rate-2 (n=1)"]


def test_the_image_is_in_the_folder_of_the_run_or_of_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(write_run(tmp_path / name, [1.0])) for name in "ab"]
    for given, folder in ((runs[:1], tmp_path / "a"), (runs, tmp_path)):
        assert plot.main(given) == 0
        assert (folder / "curve.png").exists() and f"{folder}/curve.png" in capsys.readouterr().out


def test_runs_without_meta_json_are_labelled_with_the_names_of_their_folders(
    tmp_path: Path,
) -> None:
    runs = [write_run(tmp_path / name, [1.0]) for name in "ab"]
    assert plot.labels(plot.group_runs(runs)) == ["a (n=1)", "b (n=1)"]
    assert plot.labels(plot.group_runs(runs[:1])) == ["a (n=1)"]
    (tmp_path / "other").mkdir()
    same_name = write_run(tmp_path / "other" / "a", [2.0])
    assert plot.labels(plot.group_runs([runs[0], same_name])) == [
        f"{tmp_path.name}/a (n=1)",
        "other/a (n=1)",
    ]


def test_a_setting_that_changed_during_a_run_has_all_its_values_in_the_label(
    tmp_path: Path,
) -> None:
    changing, steady = seeds(tmp_path, [1.0, 2.0])
    meta = json.loads((changing / "meta.json").read_text())
    meta["args"]["learning_rate"] = 0.2
    meta["earlier_parts"] = [{"argv": meta["argv"], "step": 0, "changed": {}}]
    extended = {"total_steps": [1, meta["args"].get("total_steps")]}
    meta["changed"] = {"learning_rate": [0.1, 0.2], "xpid": ["a", "b"]} | extended
    (changing / "meta.json").write_text(json.dumps(meta))
    assert plot.settings_of_run(changing)["learning_rate"] == "0.1, then 0.2"
    for same in ("program", "total_steps"):
        assert plot.settings_of_run(changing).get(same) == plot.settings_of_run(steady).get(same)
    assert len(plot.group_runs([changing, steady])) == 2


def test_a_single_line_is_labelled_with_its_program_and_the_title_is_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        plot, "draw", lambda _, lines, title, *__: drawn.append((lines[0][0], title))
    )
    runs = map(str, seeds(tmp_path, [1.0, 2.0]))
    assert plot.main([*runs, "--output", str(tmp_path / "curve.png")]) == 0
    assert drawn == [("monobeast (n=2)", "Catch")]


def test_a_run_without_episodes_is_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "a", [1.0]), write_run(tmp_path / "b", [float("nan")])]
    (group,) = plot.group_runs(runs)
    assert [folder.name for folder in group.curves] == ["a"]
    assert f"No episode has ended in {runs[1]} yet: skipping it." in capsys.readouterr().err


def test_other_files_of_a_sweeps_folder_are_not_taken_for_runs_without_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = write_run(tmp_path / "a", [1.0]), tmp_path / "sweep.csv"
    other.write_text("rank,agent,step\n1,seed=1,5120\n")
    (group,) = plot.group_runs([run, other])
    assert [*group.curves] == [run]
    expected = f"{other} is neither the folder of a run nor a saved curve: skipping it.\n"
    assert capsys.readouterr().err == expected


def test_a_run_that_is_named_twice_is_drawn_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1.0])
    (run / "meta.json").touch()
    (tmp_path / "latest").symlink_to("a/meta.json")
    drawn: list[tuple[str, plot.RunGroup]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "_save", lambda lines, _: drawn.extend(lines))
        assert plot.main([str(run), str(tmp_path / "latest")]) == 0
    assert [label for label, _ in drawn] == ["a (n=1)"]


def test_a_committed_curve_is_read_by_its_header_line(tmp_path: Path) -> None:
    (tmp_path / "logs.csv").write_text("step,mean_episode_return\n10,1.5\n20,\n30,2.5\n")
    assert plot.curve(tmp_path) == [(10.0, 1.5), (30.0, 2.0)]


def test_evaluations_of_runs_with_other_settings_are_other_lines(tmp_path: Path) -> None:
    files = []
    for name, rate in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        run = write_kind(tmp_path / name, "monobeast", flat(1.0), learning_rate=rate)
        files.append(run / "evaluations.csv")
        files[-1].write_text("step,mean_episode_return\n10,1.5\n20,2.5\n")
    assert [len(group.curves) for group in plot.group_runs(files)] == [2, 1]


def test_thirty_lines_look_different() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    group = plot.RunGroup({}, {Path("a"): [(0.0, 0.0), (1.0, 1.0)]})
    plot.draw(axes, [(str(number), group) for number in range(30)], "")
    drawn = [line for line in axes.get_lines() if line.get_label()[:1] != "_"]
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 30


def test_committed_curves_are_one_line_per_program_with_or_without_history(tmp_path: Path) -> None:
    columns, points = "step,seconds,mean_episode_return", "10,0.5,1.5\n20,1,\n30,2,2.5"
    said = "# commit abc\n# command python -m torchbeast.polybeast --preset catch, step, step\n"
    kept = [tmp_path / f"{name}.csv" for name in ("monobeast-1", "monobeast-12", "polybeast-1")]
    for path, history in zip(kept, ("", said, said), strict=True):
        path.write_text(f"{history}{columns}\n{points}\n")
    groups = plot.group_runs(kept)
    assert plot.labels(groups) == ["monobeast (n=2)", "polybeast (n=1)"]
    assert plot.labels(plot.group_runs(kept[:2])) == ["monobeast (n=2)"]
    assert plot.labels(plot.group_runs(kept[2:])) == ["polybeast-1 (n=1)"]
    assert {tuple(curve) for group in groups for curve in group.curves.values()} == {
        ((10.0, 1.5), (30.0, 2.0))
    }
