# SPDX-License-Identifier: Apache-2.0
"""A preset equals its flags written out, and the command line overrides it."""

from __future__ import annotations

import functools
import json
import re
import shlex
from typing import Any

import numpy as np
import pytest
import torch

from torchbeast import monobeast, zoo
from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import LearnerFlags, MonoBeastFlags
from torchbeast.core.algos.config import Schedule
from torchbeast.core.algos.optimisers import RMSprop
from torchbeast.errors import UsageError
from torchbeast.zoo import NAMES, PRESETS, Record

LEARNERS: dict[str, type[LearnerFlags]] = {
    "monobeast": MonoBeastFlags,
    "polybeast": PolyBeastFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
}
FAMILIES = ("toy", "classic", "box2d", "mujoco", "minatar", "minigrid", "atari", "agents")
EARLIER = {  # the names before each was the environment's and the algorithm's
    "atari-paper": "atari-impala",
    "bitflip-hindsight": "bitflip-dqn",
    "cartpole": "cartpole-impala",
    "cartpole-lstm": "cartpole-impala-lstm",
    "catch": "catch-impala",
    "memory": "memory-impala",
    "minatar-breakout": "minatar-breakout-impala",
    "multidiscrete": "dials-impala",
    "pendulum": "pendulum-impala",
    "pong": "pong-impala",
}


def flags_of(program: str, *args: str) -> dict[str, Any]:
    return flatten(parse(LEARNERS[program], program, ["--xpid", "x", *args]))


def test_earlier_names_of_presets_still_work() -> None:
    assert {name: NAMES[name] for name in EARLIER} == EARLIER
    of_now = flags_of("monobeast", "--preset", "pong-impala")
    assert flags_of("monobeast", "--preset", "pong") == {**of_now, "preset": "pong"}


def test_no_two_presets_have_a_name_in_common() -> None:
    assert len(NAMES) == sum(1 + len(preset.also) for preset in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_the_name_of_a_preset_has_its_algorithm(name: str) -> None:
    assert PRESETS[name].flags.get("algo", "impala") in name.split("-")[1:]
    assert PRESETS[name].family in FAMILIES


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_as_its_flags_written_out(name: str) -> None:
    """Compares through the parser, which also checks names and types."""
    own, flags = flags_of("monobeast", "--preset", name), PRESETS[name].flags
    words = [word for flag, value in flags.items() for word in (f"--{flag}", *as_typed(value))]
    assert own == {**flags_of("monobeast", *words), "preset": name}
    assert {"env", "total_steps"} <= set(flags)
    assert set(flags) - {"fixed_lag"} <= flags_of_polybeast(flags.get("algo", "impala"))


@functools.cache
def flags_of_polybeast(algo: str) -> set[str]:
    return set(flags_of("polybeast", "--algo", algo))


def test_the_servers_and_not_the_preset_decide_how_many_environments_there_are() -> None:
    assert flags_of("polybeast_learner", "--preset", "catch")["num_envs"] is None
    given = flags_of("polybeast_learner", "--preset", "catch", "--num_envs", "6")
    assert given["num_envs"] == 6
    assert flags_of("polybeast", "--preset", "catch")["num_envs"] == 16


def as_typed(value: Any) -> list[str]:
    """Returns the words after the flag."""
    if isinstance(value, tuple):
        return [*value]
    return [] if value is True else [json.dumps(value) if isinstance(value, dict) else str(value)]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_flag_on_the_command_line_overrides_the_preset(where: str) -> None:
    preset, own = ["--preset", "catch"], ["--batch_size", "4"]
    args = [*own, *preset] if where == "before" else [*preset, *own]
    flags = flags_of("monobeast", *args)
    assert flags["batch_size"] == 4 and flags["env"] == "Catch"


def test_arguments_of_a_preset_for_its_network_are_not_given_to_a_network_of_ones_own() -> None:
    preset = ["--preset", "cartpole-ppo"]
    of_built_in = flags_of("monobeast", *preset, "--model", "mlp")
    assert of_built_in["model_kwargs"] == {"orthogonal": False, "activation": "relu"}
    assert of_built_in["shared_body"] is True
    own = flags_of("monobeast", *preset, "--model", "my_module:MyNet")
    of_network = {"model": "my_module:MyNet", "model_kwargs": {}, "shared_body": None}
    assert own == {**of_built_in, **of_network}
    typed = flags_of("monobeast", *preset, "--model=m:Net", "--model_kwargs", '{"hidden": 64}')
    assert typed["model_kwargs"] == {"hidden": 64}


def test_a_switch_of_a_preset_can_be_given_again_and_turned_off() -> None:
    assert flags_of("monobeast", "--preset", "memory")["use_lstm"] is True
    assert flags_of("monobeast", "--preset", "memory", "--use_lstm")["use_lstm"] is True
    assert flags_of("monobeast", "--preset", "memory", "--no_use_lstm")["use_lstm"] is False


def test_both_spellings_of_preset_work_and_the_last_one_counts() -> None:
    assert flags_of("monobeast", "--preset=catch")["env"] == "Catch"
    assert flags_of("monobeast", "--preset", "catch", "--preset=cartpole")["env"] == "CartPole-v1"


def test_without_a_preset_the_defaults_are_those_of_the_program() -> None:
    assert flags_of("polybeast")["preset"] is None
    assert flags_of("polybeast")["batch_size"] == PolyBeastFlags().rollouts.batch_size


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(PolyBeastFlags, "polybeast", args)
    assert end.value.code == 0
    return capsys.readouterr().out


RECORD = Record(1234.5, (999.96, 1300.0), seeds=10, steps=50_000, minutes=0.3)


@pytest.fixture(autouse=True)
def one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "records", lambda: {"pendulum-sac": RECORD})
    monkeypatch.setenv("COLUMNS", "80")


def test_preset_help_groups_all_presets_by_family_in_lines_that_fit_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, "--preset", "help").splitlines()
    assert 70 < max(map(len, lines)) <= 80
    families = [line.rstrip(":") for line in lines if re.fullmatch(r"\w+:", line)]
    assert families == [family for family in FAMILIES if family in families]
    names = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    assert names == list(PRESETS)
    text = " ".join(" ".join(lines).split())
    assert all(f"{name} {preset.sentence}" in text for name, preset in PRESETS.items())


def test_preset_help_says_the_score_of_a_preset_with_a_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(printed(capsys, "--preset", "help").split())
    assert "zoo:" not in text
    said = f"{PRESETS['pendulum-sac'].sentence} Score 1234 [1000, 1300], 10 seeds, 1 min. "
    assert said in text and text.count("Score 1") == 1


def test_preset_help_names_the_agent_of_a_preset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RECORD._replace(agent={"seed": 101}, seeds=1)
    monkeypatch.setattr(zoo, "records", lambda: {"pendulum-sac": record})
    text = " ".join(printed(capsys, "--preset", "help").split())
    assert "1300], 1 seed, 1 min. Agent: zoo:pendulum-sac." in text and text.count("zoo:") == 1


def test_the_flags_that_preset_help_prints_can_be_pasted_and_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, "--preset", "help:-")
    assert 70 < max(map(len, shown.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "40")
    for text in (shown, printed(capsys, "--preset", "help:-")):
        pasted = text.replace("\\\n", "")
        for preset in PRESETS.values():
            words = shlex.split(preset.words)
            assert any(shlex.split(line) == words for line in pasted.splitlines() if "--" in line)


def test_preset_help_with_a_part_of_a_name_finds_earlier_names_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = printed(capsys, "--preset", "help:Hindsight")
    assert [line for line in shown.splitlines() if line[:1].strip()] == ["bitflip-dqn"]


@pytest.mark.parametrize("args", [["--preset", "cathc"], ["--preset=help:cathc"]])
def test_a_misspelt_preset_is_refused_with_the_closest_one(args: list[str]) -> None:
    sentence = "no preset 'cathc'; did you mean catch.* --preset help lists all presets$"
    with pytest.raises(UsageError, match=sentence):
        parse(MonoBeastFlags, "monobeast", args)


def test_a_part_of_a_name_is_refused_with_the_presets_that_have_it() -> None:
    with pytest.raises(UsageError, match="no preset 'pendul', use one of these:") as refused:
        parse(MonoBeastFlags, "monobeast", ["--preset", "pendul"])
    shown = [line.split()[0] for line in str(refused.value).splitlines()[1:]]
    assert "pendulum-sac" in shown and "Score 1234" in str(refused.value)
    assert not [name for name in PRESETS if name in shown and "pendulum" not in name]


def test_an_empty_name_of_a_preset_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no preset ''\. --preset help lists all presets$"):
        parse(MonoBeastFlags, "monobeast", ["--preset="])


def test_a_preset_without_a_name_is_refused_with_a_message() -> None:
    for args in (["--preset"], ["--preset", "--use_lstm"]):
        with pytest.raises(UsageError, match="Missing value for argument '--preset'"):
            parse(MonoBeastFlags, "monobeast", args)


def test_a_program_that_does_not_learn_has_no_presets() -> None:
    with pytest.raises(UsageError, match="Unrecognized options: --preset"):
        parse(PolyBeastEnvFlags, "polybeast_env", ["--preset", "catch"])


def test_an_unknown_preset_ends_a_program_with_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert monobeast.main(["--preset", "cathc"]) == 2
    assert capsys.readouterr().err.startswith("monobeast: there is no preset 'cathc'")


def test_a_program_without_any_argument_has_the_defaults() -> None:
    assert flatten(parse(MonoBeastFlags, "monobeast", []))["preset"] is None


def papers_moves(gradients: np.ndarray) -> np.ndarray:
    """Returns how far TensorFlow's RMSProp moves a weight in each update of the paper.

    With 0.01 and 0.99; epsilon is inside the root, and the average starts at 1. The learning rate
    is that of 50 million steps.
    """
    moves, average = np.zeros_like(gradients), 1.0
    for update, gradient in enumerate(gradients):
        average = 0.99 * average + 0.01 * gradient**2
        rate = 0.0006 * (1 - update * 32 * 20 / 50e6)
        moves[update] = rate * gradient / np.sqrt(average + 0.01)
    return moves


def moves_of_preset(gradients: np.ndarray) -> np.ndarray:
    """Returns how far our optimiser moves the weight with the flags of atari-paper."""
    flags = flags_of("polybeast", "--preset", "atari-paper")
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    names = {"lr": "learning_rate", "alpha": "alpha", "eps": "epsilon", "momentum": "momentum"}
    optimiser = RMSprop([weight], **{name: flags[flag] for name, flag in names.items()})
    rate = Schedule(flags["learning_rate"])
    places = [0.0]
    for update, gradient in enumerate(gradients):
        step = update * flags["batch_size"] * flags["unroll_length"]
        warmth = min(1.0, step / flags["warmup_steps"])
        optimiser.param_groups[0]["lr"] = rate.at(step, flags["total_steps"]) * warmth
        weight.grad = torch.tensor([gradient])
        optimiser.step()
        places.append(-weight.item())
    return np.diff(places)


@pytest.mark.parametrize("size", [0.001, 0.01, 0.1])
def test_atari_paper_moves_weights_as_far_as_the_papers_optimiser(size: float) -> None:
    """Within a third in total, and a half in the first 500 updates, where averages differ."""
    gradients = np.random.default_rng(0).normal(0, size, 3000)
    ours, theirs = abs(moves_of_preset(gradients)), abs(papers_moves(gradients))
    assert 2 / 3 < ours[500:].sum() / theirs[500:].sum() < 1.1
    assert 1 / 2 < ours[:500].sum() / theirs[:500].sum() < 2
