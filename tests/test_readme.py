# SPDX-License-Identifier: Apache-2.0
"""The commands and the Python code in README.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from torchbeast import Learner, Scheme, VecEnv
from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.actors import OnPolicyActorCritic
from torchbeast.core.base.specs import ActorSpec
from torchbeast.plot import PlotFlags

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m torchbeast\.(\w+) (.*)", README, re.MULTILINE)
OF_OWN_PARTS = re.search(r"`python -m torchbeast\.monobeast (.* --algo my_module:MyAlgo)`", README)
TRAINING, OWN = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_commands_that_train_evaluate_resume_and_plot_are_accepted() -> None:
    flags: dict[str, Any] = {"monobeast": MonoBeastFlags, "plot": PlotFlags}
    words = [(name, shlex.split(typed, comments=True)) for name, typed in COMMANDS]
    found = [parse(flags[name], name, typed) for name, typed in words]
    assert [name for name, _ in words] == ["monobeast", "monobeast", "monobeast", "plot"]
    assert [run.run.xpid for run in found[:3]] == ["catch"] * 3


def test_the_example_trains_and_evaluates_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(TRAINING.replace("100_000", "2_048"), {})
    assert (tmp_path / "logs" / "cartpole" / "model.tar").exists()
    assert 1 <= float(capsys.readouterr().out.splitlines()[-1]) <= 500


def test_the_command_that_trains_own_parts_gives_the_network_no_arguments_of_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert OF_OWN_PARTS is not None
    flags = parse(MonoBeastFlags, "monobeast", shlex.split(OF_OWN_PARTS[1]))
    assert flags.model.spec == ActorSpec("my_module:MyNet")


def test_the_environment_the_network_and_the_algorithm_of_your_own_train_together(
    tmp_path: Path,
) -> None:
    own: dict[str, Any] = {}
    exec(OWN, own)
    envs, action_space, observation_space = VecEnv.create_factory(
        env_fn=own["make_env"], env_kwargs={"steps": 7}
    )
    scheme = Scheme.preset(
        "impala",
        envs,
        col_remote_workers=0,
        col_communication="synchronous",
        actor_factory=OnPolicyActorCritic.create_factory(
            observation_space, action_space, own["MyNet"]
        ),
        algo_factory=own["MyAlgo"].create_factory(),
    )
    with Learner(scheme, 20, log_dir=tmp_path / "own") as learner:
        assert learner.step()["total_loss"] != 0
        assert type(learner.actor) is own["MyNet"]
        assert max(learner.evaluate(num_episodes=2).lengths) <= 7
