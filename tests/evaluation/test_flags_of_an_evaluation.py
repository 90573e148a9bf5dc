# SPDX-License-Identifier: Apache-2.0
"""--mode test plays with the agent of the run; a flag that names another one is refused."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from torchbeast import envs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.run import checkpoint as checkpoints

WIDE = {"hidden": 24}
QUOTED = "'{\"hidden\": 24}'"


def save(savedir: Path, **flags: Any) -> None:
    """The run `a`, which plays Catch with an untrained mlp."""
    (savedir / "a").mkdir()
    env = envs.make("Catch", 1)
    spaces = env.observation_space, env.action_space, env.frame_stack
    kwargs, lstm = flags.get("model_kwargs", {}), flags.get("use_lstm", False)
    agent = make_agent(ActorSpec("mlp", kwargs, use_lstm=lstm), *spaces)
    saved = {key: {} for key in checkpoints.KEYS} | {
        "model_state_dict": agent.model.state_dict(),
        "flags": {"env": "Catch", **flags},
        "format": 1,
        "model": "mlp",
    }
    checkpoints.save(savedir / "a" / "model.tar", saved)


def evaluate(program: str, savedir: Path, *words: str) -> int:
    run = ("--savedir", str(savedir), "--xpid", "a", "--mode", "test", "--num_episodes", "1")
    exit_code: int = importlib.import_module(f"torchbeast.{program}").main([*run, *words])
    return exit_code


@pytest.mark.parametrize(
    ("recorded", "words", "both"),
    [
        ({"model": "auto"}, ("--model", "deep"), ("model", "mlp", "deep")),
        ({}, ("--model_kwargs", '{"hidden": 24}'), ("model_kwargs", "'{}'", QUOTED)),
        ({"model_kwargs": WIDE}, ("--model_kwargs", "{}"), ("model_kwargs", QUOTED, "'{}'")),
        ({"use_lstm": True}, ("--no_use_lstm",), ("use_lstm", "True", "False")),
        ({"use_lstm": False}, ("--use_lstm",), ("use_lstm", "False", "True")),
        ({"algo": "their:Algo"}, ("--algo", "impala"), ("algo", "their:Algo", "impala")),
        ({"model": "mlp"}, ("--preset", "pong"), ("model", "mlp", "shallow-norm")),
    ],
)
def test_a_flag_that_contradicts_the_run_is_refused_with_both_sides(
    recorded: dict[str, Any],
    words: tuple[str, ...],
    both: tuple[str, str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path, **recorded)
    assert evaluate("monobeast", tmp_path, *words) == 2
    flag, before, now = both
    expected = f"--{flag} must be {before}, as in the run a, not {now}: repeat that setting, or "
    expected += "start another run"
    assert capsys.readouterr().err == f"monobeast: {expected}\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("monobeast", ()),
        ("polybeast", ()),
        ("polybeast_learner", ()),
        ("monobeast", ("--model", "auto")),
        ("monobeast", ("--model", "mlp", "--use_lstm", "--model_kwargs", '{"hidden":24}')),
        ("monobeast", ("--algo", "impala")),
    ],
)
def test_flags_that_name_the_agent_of_the_run_are_taken(
    program: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, use_lstm=True, model="mlp", model_kwargs=WIDE)
    assert evaluate(program, tmp_path, *words) == 0, capsys.readouterr().err


def test_an_algorithm_that_is_not_here_is_not_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, algo="their:Algo")
    assert evaluate("monobeast", tmp_path) == 0, capsys.readouterr().err


def test_where_no_memory_is_recorded_the_weights_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, use_lstm=True)
    path = tmp_path / "a" / "model.tar"
    saved = checkpoints.load(path)
    del saved["flags"]["use_lstm"]
    checkpoints.save(path, saved)
    assert evaluate("monobeast", tmp_path) == 0, capsys.readouterr().err
