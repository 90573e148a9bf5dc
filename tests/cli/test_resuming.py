# SPDX-License-Identifier: Apache-2.0
"""A command line takes settings from the run that it names, or the name of the latest run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import LearnerFlags, MonoBeastFlags, words_of
from torchbeast.core.base.checks import names_with
from torchbeast.errors import UsageError
from torchbeast.run import checkpoint as checkpoints

LEARNERS: dict[str, type[LearnerFlags]] = {
    "monobeast": MonoBeastFlags,
    "polybeast": PolyBeastFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
}
# What a run of its own program records, and others do in part: not one of them is a default.
RECORDED = {
    "env": "Catch",
    "num_envs": 16,
    "num_servers": 3,
    "num_workers": 5,
    "num_buffers": 70,
    "fixed_lag": None,
    "pipes_basename": "unix:/mine",
    "use_lstm": True,
    "total_steps": 5000,
    "learning_rate": 0.0006,
    "discounting": 1,
    "reward_clipping": "abs_one",
    "torch_threads": 1,
    "seed": 7,
    "checkpoint_interval": 30.0,
}
OF_ONE_COMMAND = {"mode": "test", "xpid": "old", "savedir": "/elsewhere", "preset": "pong"}
SERVERS_DECIDE = {"env": None, "num_envs": None}


@pytest.fixture
def savedir(tmp_path: Path) -> Path:
    """A folder of runs with the run `a`, which has a checkpoint."""
    (tmp_path / "a").mkdir()
    flags = RECORDED | OF_ONE_COMMAND | {"observation_keys": [], "no_flag_of_today": 1}
    checkpoints.save(tmp_path / "a" / "model.tar", {"flags": flags})
    return tmp_path


def flags_of(program: str, savedir: Path, *args: str) -> dict[str, Any]:
    return flatten(parse(LEARNERS[program], program, ["--savedir", str(savedir), *args]))


@pytest.mark.parametrize("program", LEARNERS)
def test_naming_a_run_restores_its_recorded_settings(program: str, savedir: Path) -> None:
    new, old = flags_of(program, savedir, "--xpid", "b"), flags_of(program, savedir, "--xpid=a")
    expected = {name: value for name, value in RECORDED.items() if name in new}
    if program == "polybeast_learner":
        expected |= SERVERS_DECIDE
    assert old == new | expected | {"xpid": "a"}
    assert new["env"] is None and new["learning_rate"] != 0.0006
    assert len(expected) > 10


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_command_line_overrides_recorded_settings(where: str, savedir: Path) -> None:
    name, own = ["--xpid", "a"], ["--learning_rate", "0.0004", "--no_use_lstm"]
    args = [*own, *name] if where == "before" else [*name, *own]
    flags = flags_of("polybeast", savedir, *args)
    assert flags["learning_rate"] == 0.0004 and flags["use_lstm"] is False
    assert flags["num_envs"] == 16


def test_a_preset_overrides_recorded_settings(savedir: Path) -> None:
    flags = flags_of("polybeast", savedir, "--xpid", "a", "--preset", "cartpole")
    assert flags["env"] == "CartPole-v1" and flags["learning_rate"] == 0.002
    assert flags["checkpoint_interval"] == 30.0, "which the preset leaves open"


def test_only_the_combined_settings_are_checked(savedir: Path) -> None:
    """70 buffers are too few for 80 environments, but 90 are not."""
    with pytest.raises(UsageError, match="need as many buffers, but --num_buffers is 70"):
        flags_of("monobeast", savedir, "--xpid", "a", "--num_envs", "80")
    args = ["--num_envs", "80", "--num_buffers", "90"]
    assert flags_of("monobeast", savedir, "--xpid", "a", *args)["num_envs"] == 80


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_clipping", "soft_asymmetric"),
        ("batch_size", None),
        ("batch_size", True),
        ("learning_rate", "0.1"),
        ("env", "unknown"),
        ("use_lstm", 1),
    ],
)
def test_a_recorded_value_that_the_program_does_not_know_is_ignored(
    name: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    checkpoints.save(tmp_path / "a" / "model.tar", {"flags": {name: value}})
    new, old = (flags_of("polybeast", tmp_path, "--xpid", xpid) for xpid in "ba")
    assert old[name] == new[name]


@pytest.mark.parametrize("flag", ["--env_servers", "--listen"])
def test_a_run_of_this_machines_servers_goes_on_with_those_of_others(
    savedir: Path, flag: str
) -> None:
    named = [flag, "a:1", "--insecure"]
    flags = flags_of("polybeast_learner", savedir, "--xpid", "a", *named)
    assert (flags[flag[2:]], flags["pipes_basename"]) == ("a:1", None)


def killed_before_its_first_checkpoint(savedir: Path, rows: str) -> None:
    (savedir / "a" / "model.tar").unlink()
    (savedir / "a" / "logs.csv").write_text(rows)
    (savedir / "a" / "meta.json").write_text(json.dumps({"args": RECORDED}))


def test_the_command_that_resumes_a_run_reaches_the_same_hosts_and_is_reached_as_before() -> None:
    recorded = {"env_servers": "a:1", "listen": None, "insecure": True, "tls_ca": "my ca.pem"}
    recorded["metrics_port"] = "0.0.0.0:9100"
    words = ["--env_servers", "a:1", "--insecure", "--tls_ca", "my ca.pem"]
    words += ["--metrics_port", "0.0.0.0:9100"]
    settings = {**recorded, "batch_size": 4, "token_file": None}
    assert words_of(settings, names_with("connection", PolyBeastLearnerFlags)) == words


def test_without_a_checkpoint_the_settings_come_from_meta_json(savedir: Path) -> None:
    killed_before_its_first_checkpoint(savedir, "# _tick,_time,step\n0,0,20\n")
    assert flags_of("polybeast", savedir, "--xpid", "a")["learning_rate"] == 0.0006


def test_a_command_with_a_task_starts_a_run_over_that_never_learnt_which_is_said(
    savedir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings may be the reason why it never learnt."""
    killed_before_its_first_checkpoint(savedir, "")
    now = flags_of("polybeast", savedir, "--xpid", "a", "--algo", "ppo")
    assert now["learning_rate"] != 0.0006
    assert "ended before its first update. Starting over" in capsys.readouterr().out


def test_the_name_alone_repeats_a_run_that_never_learnt(savedir: Path) -> None:
    """Ctrl-C during the first batch leaves such a folder."""
    killed_before_its_first_checkpoint(savedir, "")
    assert flags_of("polybeast", savedir, "--xpid", "a")["learning_rate"] == 0.0006


@pytest.mark.parametrize(
    ("program", "mode"),
    [("monobeast", "test"), ("polybeast", "test_render"), ("polybeast_learner", "test")],
)
def test_mode_test_without_a_name_evaluates_the_latest_run(
    program: str, mode: str, savedir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (savedir / "b").mkdir()
    (savedir / "a" / "meta.json").touch()
    (savedir / "latest").symlink_to("a/meta.json")
    assert flags_of(program, savedir, "--mode", mode)["xpid"] == "a"
    assert capsys.readouterr().out == "Testing the latest run, a.\n"
    assert flags_of(program, savedir, f"--mode={mode}", "--xpid", "b")["xpid"] == "b"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("program", LEARNERS)
def test_a_run_that_is_tested_brings_what_its_agent_was_made_of_alone(
    program: str, savedir: Path
) -> None:
    agent = {"algo": "nobody_has:It", "model_kwargs": {"hidden": 24}, "model": "mlp"}
    checkpoints.save(savedir / "a" / "model.tar", {"flags": RECORDED | agent})
    test = ("--mode", "test", "--xpid", "a")
    new, old = flags_of(program, savedir, *test[:3], "b"), flags_of(program, savedir, *test)
    assert old == new | agent | {"use_lstm": True, "xpid": "a"}
    assert flags_of(program, savedir, *test, "--no_use_lstm")["use_lstm"] is False


def test_a_preset_with_a_replay_does_not_change_the_algorithm_of_an_evaluation(
    savedir: Path,
) -> None:
    words = ["--mode", "test", "--preset", "memory-r2d2", "--xpid", "b"]
    assert flags_of("monobeast", savedir, *words)["algo"] == "r2d2"


@pytest.mark.parametrize("what", ["nothing", "gone", "a folder"])
def test_mode_test_without_a_latest_run_is_refused_with_a_message(
    what: str, tmp_path: Path
) -> None:
    if what == "gone":
        (tmp_path / "latest").symlink_to("a")
    elif what == "a folder":
        (tmp_path / "latest").mkdir()
    with pytest.raises(UsageError, match=f"there is no latest run in {tmp_path} to test: use"):
        flags_of("polybeast", tmp_path, "--mode", "test")


def test_an_agent_of_the_zoo_is_tested_with_its_algorithm(savedir: Path) -> None:
    words = ["--mode", "test", "--xpid", "zoo:cartpole-ppo", "--follow", "false"]
    flags = flags_of("monobeast", savedir, *words)
    assert flags["algo"] == "ppo" and flags["xpid"] == "zoo:cartpole-ppo"


@pytest.mark.parametrize(
    "words", [(), ("--mode", "test", "--follow"), ("--mode", "test", "--follow=true")]
)
def test_an_agent_of_the_zoo_is_not_a_run_to_continue(
    words: tuple[str, ...], savedir: Path
) -> None:
    with pytest.raises(UsageError, match="zoo:cartpole-ppo is a trained agent, and not a run: add"):
        flags_of("monobeast", savedir, "--xpid", "zoo:cartpole-ppo", *words)


def test_a_new_run_does_not_resume_the_latest_one(savedir: Path) -> None:
    (savedir / "latest").symlink_to("a")
    flags = flags_of("polybeast", savedir)
    assert flags["xpid"].startswith("torchbeast-") and flags["env"] is None


def test_a_name_that_is_a_path_is_refused_before_anything_is_read(savedir: Path) -> None:
    with pytest.raises(UsageError, match="--xpid must be a plain name"):
        flags_of("polybeast", savedir / "b", "--xpid", "../a")
