# SPDX-License-Identifier: Apache-2.0
"""--algo: an algorithm adds its flags, and a resumed run keeps its algorithm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bench import end_to_end
from bench.flags import BenchFlags

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.contract import CollectionPlan
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.base import Algorithm, Losses
from torchbeast.core.algos.laser import LASER
from torchbeast.core.algos.registry import ALGOS
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.checks import above
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.reporting.run_folder import session
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.assemble import assemble
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.plan import Plan

LEARNERS: dict[str, Any] = {
    "monobeast": MonoBeastFlags,
    "polybeast": PolyBeastFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
    "bench": BenchFlags,
}


@dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """Plain gradient descent."""

    step_size: float = 0.1
    """Length of a step."""

    def __post_init__(self) -> None:
        above(0, step_size=self.step_size)


@dataclass(frozen=True, kw_only=True)
class MineConfig:
    """A user's own algorithm."""

    boldness: int = 3
    """How bold it is."""
    optimiser: SgdConfig = field(default_factory=SgdConfig)


class Mine(Algorithm[Rollout]):
    """Learns values of 0."""

    Config = MineConfig

    def __init__(self, actor: Any, config: MineConfig) -> None:
        super().__init__(actor, config)
        sgd = torch.optim.SGD(actor.parameters(), lr=config.optimiser.step_size)
        self.optimisers = {"actor": sgd}

    def losses(self, minibatch: Rollout) -> Losses:
        _, values, _, _ = unroll(self.actor, minibatch)
        return Losses({"value_loss": values.square().sum()})


@dataclass(frozen=True, kw_only=True)
class ClashingConfig:
    """Has a setting with the name of another flag."""

    batch_size: int = 2
    """Clashes with --batch_size."""


class Clashing(Mine):
    Config = ClashingConfig


@dataclass(frozen=True, kw_only=True)
class DeepConfig:
    """Has two groups of settings with the same names."""

    actor: MineConfig = field(default_factory=MineConfig)
    critic: MineConfig = field(default_factory=MineConfig)


class Deep(Mine):
    Config = DeepConfig


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    """Has settings of types that JSON can hold, and of others."""

    sizes: tuple[int, ...] = (1, 2)
    """JSON's list."""
    style: Literal["a", "b"] | None = None
    """JSON's string or null."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON's object."""
    data: Path | None = None
    """A file."""


@dataclass(frozen=True, kw_only=True)
class TauConfig:
    """Has a setting with another library's name for one of ours."""

    lr: float = 0.5
    """Not the learning_rate."""


class Tau(Mine):
    Config = TauConfig


def test_an_own_setting_wins_over_another_librarys_name_for_a_flag() -> None:
    words = ["--algo", f"{__name__}:Tau", "--lr", "0.25"]
    assert parse(MonoBeastFlags, "monobeast", words).algorithm == TauConfig(lr=0.25)


class OfPath(Mine):
    Config = PathConfig


MINE = f"{__name__}:Mine"


@pytest.mark.parametrize("program", LEARNERS)
def test_the_flags_of_an_algorithm_replace_those_of_the_default_one(program: str) -> None:
    words = ["--algo", MINE, "--boldness", "5", "--step_size", "0.5"]
    flags = parse(LEARNERS[program], program, words)
    assert isinstance(flags, LEARNERS[program])
    assert flags.algorithm == MineConfig(boldness=5, optimiser=SgdConfig(step_size=0.5))
    given, usual = set(flatten(flags)), set(flatten(LEARNERS[program]()))
    assert given - usual == {"boldness", "step_size"}
    assert {"entropy_cost", "learning_rate"} <= usual - given
    assert flatten(flags)["algo"] == MINE and flatten(LEARNERS[program]())["algo"] == "impala"


def test_a_flag_of_other_algorithms_is_said_to_be_theirs() -> None:
    theirs = r"options: --normalise_returns. --normalise_returns is .* impala, laser, ppo\. See"
    with pytest.raises(UsageError, match=theirs):
        parse(MonoBeastFlags, "monobeast", ["--algo", "td3", "--normalise_returns"])
    with pytest.raises(UsageError, match=r"--clip_param, 0.1. --clip_param is .* ppo\. See"):
        parse(MonoBeastFlags, "monobeast", ["--clip_param", "0.1"])


def test_flags_of_an_algorithm_have_help_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(MonoBeastFlags, "monobeast", ["--help", "--algo", MINE])
    shown = capsys.readouterr().out
    assert "How bold it is." in shown and "Length of a step." in shown
    assert "--entropy_cost" not in shown and "Trains an agent" in shown
    with pytest.raises(UsageError, match="^--step_size must be greater than 0, got -1.0. See"):
        parse(MonoBeastFlags, "monobeast", ["--algo", MINE, "--step_size", "-1"])
    with pytest.raises(UsageError, match="Unrecognized options: --entropy_cost"):
        parse(MonoBeastFlags, "monobeast", ["--algo", MINE, "--entropy_cost", "1"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "nosuch",
            "--algo: there is no algorithm 'nosuch': use impala, laser, ppo, pqn, "
            "dqn, sac, r2d2, td3, or my_",
        ),
        ("no_module:A", "no_module:A: there is no module no_module"),
        (f"{__name__}:MineConfig", "is not an algorithm: it must be a subclass of"),
        (f"{__name__}:Clashing", "names of other settings or flags, batch_size: rename"),
        (f"{__name__}:Deep", "other settings or flags, boldness, step_size: rename"),
        (f"{__name__}:Absent", "Absent: the module test_algorithm has no 'Absent'"),
    ],
)
def test_an_algorithm_that_cannot_be_used_is_refused_in_one_sentence(
    name: str, sentence: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse(PolyBeastFlags, "polybeast", ["--algo", name])
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_setting_that_a_checkpoint_cannot_hold_is_refused() -> None:
    words = ["--algo", f"{__name__}:OfPath", "--sizes", "1", "2"]
    parse(PolyBeastFlags, "polybeast", words)
    with pytest.raises(
        UsageError, match="--data has a value that JSON cannot represent, PosixPath"
    ):
        parse(PolyBeastFlags, "polybeast", [*words, "--data", "a"])


@pytest.mark.parametrize("code", ["raise ValueError('a bug')", "{}['a bug']", "a bug"])
@pytest.mark.parametrize("place", [".", "site-packages"])
def test_an_error_in_an_algorithms_module_is_told_with_its_line(
    code: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / place / "module_with_a_bug.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"\n{code}\n")
    monkeypatch.syspath_prepend(file.parent)
    with pytest.raises(RunError, match="^the algorithm module_with_a_bug:My failed: ") as error:
        parse(PolyBeastFlags, "polybeast", ["--algo", "module_with_a_bug:My"])
    said = str(error.value)
    assert f'File "{file}", line 2' in said and code in said and "core/base/specs.py" not in said


def test_the_flags_of_built_in_algorithms_are_read_without_torch() -> None:
    code = f"""
import sys
from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastFlags
for algo in {list(ALGOS)}:
    parse(PolyBeastFlags, "polybeast", ["--algo", algo, "--discounting", "0.9"])
    assert "torch" not in sys.modules, algo
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_replay_of_actions_without_relevance_is_a_sentence_at_the_start() -> None:
    def agent_of_a_box(spec: ActorSpec) -> Agent:
        return make_agent(spec, ArraySpec((4,), "float32"), Box(-1.0, 1.0, (2,)), 1)

    def assembled(*words: str) -> Any:
        flags = parse(MonoBeastFlags, "monobeast", ["--algo", "laser", *words])
        config = flags.learner_config("Catch")
        return assemble(config, agent_of_a_box, PublishedWeights)

    message = "some are continuous, .*: use replay_kl_threshold inf .*, or another algorithm"
    with pytest.raises(UsageError, match=message):
        assembled()
    everywhere = assembled("--replay_size", "1000", "--replay_kl_threshold", "inf")
    assert type(everywhere.algo) is LASER


def test_bench_passes_the_algorithm_to_the_program_that_it_measures() -> None:
    given = parse(BenchFlags, "bench", ["--algo", MINE, "--boldness", "7"])
    started = parse(PolyBeastFlags, "polybeast", end_to_end.arguments(given))
    assert started.algorithm == given.algorithm and started.defaults.algo == MINE


def agent(spec: ActorSpec) -> Agent:
    return make_agent(spec, ArraySpec((4,), "float32"), Discrete(3), 1)


def test_a_learner_is_assembled_with_the_algorithm() -> None:
    flags = parse(MonoBeastFlags, "monobeast", ["--algo", MINE, "--step_size", "0.25"])
    plan = plan_of(flags)
    made = assemble(plan.learner, plan.make_agent, PublishedWeights)
    assert type(made.algo) is Mine
    assert made.algo.optimisers["actor"].param_groups[0]["lr"] == 0.25
    record = plan.record()
    assert record["step_size"] == 0.25 and "reward_clipping" not in record


def plan_of(flags: MonoBeastFlags) -> Plan:
    """Returns a plan that can be assembled; it has no source."""
    spaces = ArraySpec((4,), "float32"), Discrete(3), 1
    collection = CollectionPlan(num_envs=4, processes=2, fixed_lag=None)
    return flags.plan("monobeast", EnvSpec("Catch"), spaces, collection)


def resume(folder: Path, *words: str) -> MonoBeastFlags:
    """Starts a run that has nothing left to learn, so that it is only assembled."""
    args = ["--savedir", str(folder), "--xpid", "run", *words]
    flags = parse(MonoBeastFlags, "monobeast", args)
    with session(flags.run.folder, flatten(flags)) as opened:
        LearnerRun(plan_of(flags), opened).train()
    return flags


def save_complete(folder: Path, **flags: Any) -> None:
    """Saves the checkpoint of a run that has learnt all its steps."""
    args = ["--algo", flags.get("algo", "impala")]
    config = parse(MonoBeastFlags, "monobeast", args).learner_config("Catch")
    made = assemble(config, agent, PublishedWeights)
    saved = {
        **made.optimiser_step.state_dict(),
        "stats": {"step": 10**9},
        "flags": {"env": "Catch", **flags},
        "format": checkpoints.FORMAT,
        "model": "mlp",
    }
    (folder / "run").mkdir()
    checkpoints.save(folder / "run" / "model.tar", saved)


def test_a_run_is_resumed_with_its_algorithm_and_settings(tmp_path: Path) -> None:
    save_complete(tmp_path, algo=MINE, boldness=9, step_size=0.125)
    flags = resume(tmp_path)
    assert flags.defaults.algo == MINE
    assert flags.algorithm == MineConfig(boldness=9, optimiser=SgdConfig(step_size=0.125))


@pytest.mark.parametrize(
    ("recorded", "now"),
    [
        ({"algo": MINE}, "impala"),
        ({"algo": "impala"}, MINE),
        ({}, MINE),
        ({"algo": "ppo", "replay_size": 0}, "dqn"),  # which cannot use such a replay
    ],
)
def test_a_run_is_not_resumed_with_another_algorithm(
    tmp_path: Path, recorded: dict[str, Any], now: str
) -> None:
    """Before algorithms were recorded all runs learnt with impala."""
    save_complete(tmp_path, **recorded)
    before = recorded.get("algo", "impala")
    expected = (
        f"^(--)?algo must be {before}, as in the run run, not {now}: repeat that setting, or start "
        "another run"
    )
    with pytest.raises(UsageError, match=expected):
        resume(tmp_path, "--algo", now)


@pytest.mark.parametrize("kind", [TypeError, ValueError, NotImplementedError])
@pytest.mark.parametrize("method", ["__init__", "check_actor"])
def test_an_error_in_an_algorithms_own_code_keeps_its_traceback(
    kind: type[Exception], method: str
) -> None:
    class Broken(Mine):
        pass

    def fail(*_: Any) -> None:
        raise kind("a bug")

    setattr(Broken, method, fail)

    flags = parse(MonoBeastFlags, "monobeast", ["--algo", MINE])
    config = flags.learner_config("Catch")
    object.__setattr__(config, "algo", Broken)
    with pytest.raises(kind, match="a bug") as error:
        assemble(config, agent, PublishedWeights)
    assert not isinstance(error.value, UsageError)


def test_a_network_without_the_extras_that_the_algorithm_needs_is_refused() -> None:
    class Wanting(Mine):
        needs = ("no_such_extra",)

    flags = parse(MonoBeastFlags, "monobeast", ["--algo", MINE])
    config = flags.learner_config("Catch")
    object.__setattr__(config, "algo", Wanting)
    with pytest.raises(UsageError, match="no_such_extra"):
        assemble(config, agent, PublishedWeights)


@dataclass(frozen=True, kw_only=True)
class ListConfig:
    """Has a list."""

    scales: list[float] = field(default_factory=lambda: [1.0])
    """Scales of the losses."""


class OfList(Mine):
    Config = ListConfig


def test_a_list_among_the_settings_is_kept_when_a_run_resumes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    flags = {"algo": f"{__name__}:OfList", "scales": [0.5, 2.0]}
    checkpoints.save(tmp_path / "run" / "model.tar", {"flags": flags})
    words = ["--savedir", str(tmp_path), "--xpid", "run"]
    assert parse(MonoBeastFlags, "monobeast", words).algorithm == ListConfig(scales=[0.5, 2.0])
