# SPDX-License-Identifier: Apache-2.0
"""Factories that checkpoints and servers name are not called with arguments of their choice."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from torchbeast import envs, load_agent
from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.contract import CollectionPlan
from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.registry import make_agent, make_model
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.toy import Catch
from torchbeast.errors import UsageError
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import check_named, naming_flags, recorded_env
from torchbeast.run.plan import Plan

PROGRAMS = ("monobeast", "polybeast", "polybeast_learner")
SENTENCE = "named on the command line: if you trust this run to call os:system with"
OWN = f"{__name__}:own_catch"


def own_catch(num_envs: int, rows: int = 10) -> VecEnv:
    """A user's factory."""
    return Catch(num_envs, rows=rows)


def save(savedir: Path, **flags: Any) -> None:
    """Makes the run `a`, which fits Catch."""
    (savedir / "a").mkdir(exist_ok=True)
    env = envs.make(envs.EnvSpec("Catch"), 1)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, env.frame_stack)
    saved = {key: {} for key in checkpoints.KEYS} | {
        "model_state_dict": agent.model.state_dict(),
        "flags": {"model": "mlp", **flags},
    }
    checkpoints.save(savedir / "a" / "model.tar", saved)


CALLS: list[Any] = []


def noting(observation_space: Any, action_space: Any, use_lstm: bool) -> None:
    """Any function, which a checkpoint may name as its network."""
    CALLS.append(observation_space)


def test_a_function_gets_no_spaces_that_a_checkpoint_brings(tmp_path: Path) -> None:
    agent = make_agent(ActorSpec("mlp"), {"/bin/touch": ArraySpec((4,), "float32")}, Discrete(3), 1)
    labels = checkpoints.labels(agent, {"env": "Catch"}) | {"model": f"{__name__}:noting"}
    saved = {key: {} for key in checkpoints.KEYS} | labels
    checkpoints.save(tmp_path / "model.tar", saved)
    with pytest.raises(UsageError, match="noting"):
        load_agent(tmp_path)
    assert [space.shape for space in CALLS] == [(10, 5)]


def main(program: str, savedir: Path, *args: str) -> int:
    run = ("--savedir", str(savedir), "--xpid", "a")
    exit_code: int = importlib.import_module(f"torchbeast.{program}").main([*run, *args])
    return exit_code


def touching(path: Path) -> dict[str, Any]:
    """Returns flags whose environment creates the file."""
    return {"env": "os:system", "env_kwargs": {"command": f"touch {shlex.quote(str(path))}"}}


TEST = ("--mode", "test", "--num_episodes", "2")
BY = [(program, TEST) for program in PROGRAMS] + [("monobeast", ()), ("polybeast", ())]


@pytest.mark.parametrize(("program", "args"), BY)
def test_a_checkpoint_calls_no_factory_with_arguments_that_nobody_typed(
    program: str, args: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    save(tmp_path, **touching(made))
    assert main(program, tmp_path, *args) == 2
    said = capsys.readouterr().err
    assert SENTENCE in said and said.endswith("add --env os:system\n")
    assert not made.exists()


def test_meta_json_calls_no_factory_with_arguments_that_nobody_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "logs.csv").write_text("step\n1\n")
    meta = {"args": touching(tmp_path / "made")}
    (tmp_path / "a" / "meta.json").write_text(json.dumps(meta))
    assert main("monobeast", tmp_path) == 2
    assert SENTENCE in capsys.readouterr().err and not (tmp_path / "made").exists()


def described(options: dict[str, Any], env_id: str) -> dict[str, Any]:
    """Returns the description of a server."""
    return {
        "env_id": env_id,
        "num_envs": 1,
        "num_streams": 1,
        "num_servers": 1,
        "frame_stack": 1,
        "observation": ("float32", (10, 5)),
        "action_space": {"type": "Discrete", "n": 3, "start": 0},
        "options": options,
    }


def recorded_from(description: dict[str, Any], savedir: Path) -> dict[str, Any]:
    """Returns what a learner would record of the environment of such a server."""
    learner = importlib.import_module("torchbeast.polybeast_learner")
    seen: list[Plan] = []

    class Run:
        def __init__(self, plan: Plan, *_: Any, **__: Any) -> None:
            seen.append(plan)

        def train(self, *_: Any) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("libtorchbeast.describe", lambda address, timeout_s, credentials: description)
        patch.setattr(learner, "LearnerRun", Run)
        assert main("polybeast_learner", savedir, "--pipes_basename", "unix:/no") == 0
    return seen[0].recorded_env()


@pytest.mark.parametrize("named", [(), ("--env", "os:system")], ids=["nothing typed", "--env"])
@pytest.mark.parametrize(("program", "args"), BY)
def test_a_servers_description_calls_no_factory(
    program: str,
    args: tuple[str, ...],
    named: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("libtorchbeast")
    options = touching(tmp_path / "made")
    description = described({"env_kwargs": options["env_kwargs"]}, "os:system")
    save(tmp_path, **recorded_from(description, tmp_path))
    capsys.readouterr()
    assert main(program, tmp_path, *args, *named) == 2
    said = capsys.readouterr().err
    assert SENTENCE in said and 'add --env os:system --env_kwargs \'{"command": ' in said
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "typed"), [("os:system", {"env": "os:system"}), ("os:system", {}), ("Catch", {})]
)
def test_a_learner_calls_a_servers_factory_only_with_arguments_that_were_typed(
    name: str, typed: dict[str, Any]
) -> None:
    kwargs = {"command": "true"}

    def here(asked: envs.EnvSpec) -> envs.EnvSpec:
        env, spaces = envs.EnvSpec(name, kwargs), (ArraySpec((), "float32"), Discrete(2), 1)
        collection = CollectionPlan(num_envs=1, processes=None, fixed_lag=None)
        plan = MonoBeastFlags().plan("polybeast_learner", env, spaces, collection)
        return dataclasses.replace(plan, others_serve=True, asked=asked).local_env()

    if name == "os:system":
        with pytest.raises(UsageError, match=SENTENCE):
            here(envs.EnvSpec(typed.get("env", "")))
    assert here(envs.EnvSpec(name, kwargs)).kwargs == kwargs
    assert here(envs.EnvSpec(name, {"command": "false"})).kwargs == {"command": "false"}


@pytest.mark.parametrize(
    "words",
    [
        ("--eval_every", "9"),
        ("--callback", "a:B"),
        ("--algo", "dqn", "--n_step", "1", "--hindsight_share", "0.8"),
    ],
)
def test_a_learner_takes_arguments_for_environments_of_its_own(words: tuple[str, ...]) -> None:
    typed = ["--env", OWN, "--env_kwargs", '{"rows": 10}', *words]
    flags = parse(PolyBeastLearnerFlags, "polybeast_learner", typed)
    assert flags.environment.asked == envs.EnvSpec(OWN, {"rows": 10})


def test_arguments_of_a_built_in_environment_are_recorded_as_described(tmp_path: Path) -> None:
    pytest.importorskip("libtorchbeast")
    recorded = recorded_from(described({"env_kwargs": {"rows": 10}}, "Catch"), tmp_path)
    assert recorded["env_kwargs"] == {"rows": 10}


@pytest.mark.parametrize(
    "named", [("--env", OWN), ("--env_kwargs", '{"rows": 10}')], ids=["--env", "--env_kwargs"]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_factory_that_the_user_names_is_called(
    program: str, named: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, env=OWN, env_kwargs={"rows": 10})
    assert main(program, tmp_path, *TEST, *named) == 0, capsys.readouterr().err


@pytest.mark.parametrize("others_serve", [False, True])
@pytest.mark.parametrize("name", [OWN, "Catch"])
def test_the_flags_that_name_a_recorded_environment_are_accepted_and_needed(
    name: str, others_serve: bool
) -> None:
    env = envs.EnvSpec(name, {"rows": 10})
    recorded = recorded_env(env, others_serve)
    flags = naming_flags(recorded)
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    kwargs = json.loads(words.get("--env_kwargs", "{}"))
    check_named(recorded, envs.EnvSpec(words.get("--env", ""), kwargs))
    assert (kwargs or recorded["env_kwargs"]) == env.kwargs
    assert bool(flags) == (name == OWN)
    if flags:
        with pytest.raises(UsageError, match="add --env"):
            check_named(recorded, envs.EnvSpec(""))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_recorded_factory_without_arguments_is_called(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, env=OWN, env_kwargs={})
    assert main(program, tmp_path, *TEST) == 0, capsys.readouterr().err


def test_a_run_resumes_with_its_arguments_when_the_user_names_the_factory(tmp_path: Path) -> None:
    save(tmp_path, env=OWN, env_kwargs={"rows": 10})
    args = ["--savedir", str(tmp_path), "--xpid", "a", "--env", OWN]
    assert parse(MonoBeastFlags, "monobeast", args).environment.env_kwargs == {"rows": 10}


CALLED: list[Any] = []


def not_a_class(*args: Any, **kwargs: Any) -> Actor:
    CALLED.append(kwargs)
    raise AssertionError("it was called")


def test_keyword_arguments_of_a_network_reach_classes_of_actors_only() -> None:
    spec = ActorSpec(f"{__name__}:not_a_class", {"command": "any"})
    with pytest.raises(ValueError, match="keyword arguments are only given to a subclass of"):
        make_model(spec, ArraySpec((4,), "float32"), Discrete(3))
    assert not CALLED


def test_polybeast_learner_leaves_keyword_arguments_to_its_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("polybeast_learner", tmp_path, "--env_kwargs", '{"rows": 10}') == 2
    assert "--env_kwargs is for --mode test" in capsys.readouterr().err
