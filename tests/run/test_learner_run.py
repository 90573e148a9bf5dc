# SPDX-License-Identifier: Apache-2.0
"""The run of a learner, with batches made by the tests."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_training import B, ListSource, T, rollout

from torchbeast import monobeast
from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.cli.learner_flags import LearnerFlags, MonoBeastFlags
from torchbeast.collect.config import ProcessesConfig, RolloutConfig
from torchbeast.collect.contract import CollectionPlan, LearnerInfo
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.config import IMPALAConfig, OptimiserConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.base.checks import names_with
from torchbeast.core.base.specs import ActorSpec, ModelConfig
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.envs import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.log_files import LogFiles, read_logs
from torchbeast.reporting.run_folder import RunConfig, run_path, session
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run import learner_run
from torchbeast.run.config import (
    CheckpointConfig,
    HardwareConfig,
    TrainingConfig,
    changes,
    recorded_env,
)
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.plan import Plan
from torchbeast.run.training import DONE
from torchbeast.run.watch import RunDisplay

GOOD, BAD = 1.0, float("nan")
MLP = ActorSpec("mlp")


class EndingSource(ListSource):
    """Stops the run after its last batch."""

    def start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def batches(self) -> Iterator[Any]:
        yield from super().batches()
        self._supervisor.stop("there are no more batches")


def agent(spec: ActorSpec = MLP) -> Agent:
    # Without bounds, as CartPole's: a network that reads values normalises it.
    seen = ArraySpec((4,), "float32", low=-math.inf, high=math.inf)
    return make_agent(spec, seen, Discrete(3), 1)


def old_agent(spec: ActorSpec) -> Agent:
    """Makes an agent as before there was a format."""
    return agent(dataclasses.replace(spec, reads_values=False))


LEARNERS: list[LearnerInfo] = []  # of every run


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenCollection(CollectionPlan):
    """Collects with a source of the test."""

    make_source: Callable[[LearnerInfo], Any]

    def source(self, learner: LearnerInfo, *_: Any) -> Any:
        return self.make_source(learner)


def plan_of(
    flags: LearnerFlags,
    make_source: Callable[[LearnerInfo], Any],
    make_agent: Callable[[ActorSpec], Agent] = agent,
    env_id: str = "Catch",
) -> Plan:
    """Returns the plan of a run whose source and agent the test makes."""
    collection = GivenCollection(num_envs=4, processes=2, fixed_lag=None, make_source=make_source)
    spaces: Any = (), Discrete(3), 1
    plan = flags.plan("monobeast", EnvSpec(env_id), spaces, collection)
    return dataclasses.replace(plan, make_agent=make_agent)


def train(
    folder: Path,
    *rewards: float,
    groups: dict[str, Any] | None = None,
    make: Callable[[ActorSpec], Agent] = agent,
    resumed: Path | None = None,
) -> None:
    """Learns one batch for each reward; resumes the run in the folder, or another checkpoint."""
    flags = MonoBeastFlags(run=RunConfig(savedir=str(folder), xpid="run", seed=1), **(groups or {}))
    train_with(flags, "Catch", *rewards, make=make, resumed=resumed)


def train_with(
    flags: LearnerFlags,
    env_id: str,
    *rewards: float,
    make: Callable[[ActorSpec], Agent] = agent,
    resumed: Path | None = None,
) -> None:
    """Learns one batch for each reward, with these settings."""

    def source() -> EndingSource:
        return EndingSource([rollout(reward) for reward in rewards])

    train_from(source, flags, env_id, make, resumed)


def train_from(
    make_source: Callable[[], EndingSource],
    flags: LearnerFlags,
    env_id: str = "Catch",
    make: Callable[[ActorSpec], Agent] = agent,
    resumed: Path | None = None,
) -> None:
    """Learns from the source until it ends the run."""

    def source(learner: LearnerInfo) -> EndingSource:
        LEARNERS.append(learner)
        return make_source()

    plan = plan_of(flags, source, make, env_id)
    with session(flags.run.folder, flatten(flags)) as opened:
        LearnerRun(plan, opened, resumed).train()


def files(folder: Path) -> dict[str, bytes]:
    """Returns the files of a run, except what it said."""
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "out.log"}


@pytest.mark.parametrize("options", [{}, {"pause_at": 1}])
def test_a_run_that_is_complete_keeps_its_files_as_they_are(
    tmp_path: Path, options: dict[str, int]
) -> None:
    groups: dict[str, Any] = {"training": TrainingConfig(total_steps=T * B)}
    train(tmp_path, GOOD, groups=groups)
    before = files(tmp_path / "run")
    run = RunConfig(savedir=str(tmp_path), xpid="run", seed=2, **options)
    groups["algorithm"] = IMPALAConfig(entropy_cost=0.5)
    train_with(MonoBeastFlags(run=run, **groups), "Catch", GOOD)
    assert files(tmp_path / "run") == before


def test_hosts_that_dial_in_to_a_complete_run_may_end(tmp_path: Path) -> None:
    groups: dict[str, Any] = {"training": TrainingConfig(total_steps=T * B)}
    train(tmp_path, GOOD, groups=groups)
    flags = MonoBeastFlags(run=RunConfig(savedir=str(tmp_path), xpid="run"), **groups)
    with session(flags.run.folder, flatten(flags)) as opened:
        LearnerRun(plan_of(flags, lambda _: EndingSource([])), opened).train()
        assert opened.supervisor.reason == DONE


def test_every_part_of_a_run_is_recorded_with_what_changed_there(tmp_path: Path) -> None:
    train(tmp_path, GOOD)
    train(tmp_path, GOOD, groups={"training": TrainingConfig(total_steps=77_000)})
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    (first,) = meta["earlier_parts"]
    assert (first["step"], first["changed"], meta["step"]) == (0, {}, T * B)
    assert meta["changed"] == {"total_steps": [100_000, 77_000]}
    assert meta["args"]["total_steps"] == 77_000 and first["date_end"] <= meta["date_start"]


def rates_of(folder: Path, batches: int, *, restart: bool = True, **settings: Any) -> list[float]:
    """Trains on batches of a run of ten; returns the learning rates of its log so far."""
    run = RunConfig(savedir=str(folder), xpid="run", seed=1, restart_schedules=restart)
    groups: dict[str, Any] = {"training": TrainingConfig(total_steps=10 * T * B)}
    groups["algorithm"] = IMPALAConfig(optimiser=OptimiserConfig(**settings))
    train_with(MonoBeastFlags(run=run, **groups), "Catch", *[GOOD] * batches)
    return [row["learning_rate"] for row in read_logs(folder / "run")]


def test_a_resumed_run_trains_with_the_rate_that_was_typed_from_its_step_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates_of(tmp_path, 5, learning_rate=0.01)
    assert "learning_rate 0.01, linear to 0 at step" in capsys.readouterr().out
    rates_of(tmp_path, 1, learning_rate=0.003)
    start = f"{5 * T * B:,}"
    assert f"learning_rate 0.003 from step {start} on (was 0.005), linear to 0" in (
        said := capsys.readouterr().out
    )
    assert "learning_rate 0.003 (previously" not in said, "another number for what it was"
    rates = rates_of(tmp_path, 2, learning_rate=0.003)
    assert rates[:5] == pytest.approx([0.01, 0.009, 0.008, 0.007, 0.006])
    assert rates[5:] == pytest.approx([0.003, 0.0024, 0.0018])
    assert "learning_rate 0.0024, linear" in capsys.readouterr().out
    rates = rates_of(tmp_path, 1, learning_rate=0.003, learning_rate_schedule="constant")
    assert rates[8] == pytest.approx(0.003)


def test_without_a_restart_another_rate_scales_the_schedule_of_the_whole_run(
    tmp_path: Path,
) -> None:
    rates_of(tmp_path, 5, learning_rate=0.01)
    assert rates_of(tmp_path, 1, restart=False, learning_rate=0.02)[5] == pytest.approx(0.01)


def test_a_nan_saves_the_state_before_it_beside_the_checkpoint(tmp_path: Path) -> None:
    model, last_good = tmp_path / "run" / "model.tar", tmp_path / "run" / "last_good.tar"
    train(tmp_path, GOOD, GOOD)
    before = model.read_bytes()
    assert not last_good.exists()
    with pytest.raises(RunError, match="loss is nan") as error:
        train(tmp_path, GOOD, BAD, GOOD)
    assert str(last_good) in str(error.value)
    assert model.read_bytes() == before
    kept = checkpoints.load(last_good)
    assert kept["stats"]["step"] == 3 * T * B and kept["scheduler_state_dict"]["version"] == 3
    assert kept["flags"]["env"] == "Catch"
    assert checkpoints.first_non_finite_tensor(kept) is None


def test_settings_that_only_another_program_has_stay_recorded(tmp_path: Path) -> None:
    train(tmp_path, GOOD)
    path = tmp_path / "run" / "model.tar"
    saved = checkpoints.load(path)
    checkpoints.save(path, {**saved, "flags": {**saved["flags"], "num_servers": 3}})
    train(tmp_path, GOOD)
    assert checkpoints.load(path)["flags"]["num_servers"] == 3


def test_a_run_is_not_resumed_with_actions_that_mean_something_else(tmp_path: Path) -> None:
    train(tmp_path, GOOD)
    path = tmp_path / "run" / "model.tar"
    before = {"type": "Discrete", "n": 3, "start": 1}
    checkpoints.save(path, {**checkpoints.load(path), "action_space": before})
    with pytest.raises(UsageError, match="action_space must be .*start=1.*, not .*start=0.*: use"):
        train(tmp_path, GOOD)


def test_a_run_can_be_resumed_from_the_last_good_state(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        train(tmp_path, GOOD, BAD)
    shutil.copy(tmp_path / "run" / "last_good.tar", tmp_path / "run" / "model.tar")
    train(tmp_path, GOOD)
    assert checkpoints.load(tmp_path / "run" / "model.tar")["stats"]["step"] == 2 * T * B


def test_a_run_that_fails_in_its_first_update_tells_the_line_and_leaves_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("a bug")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="a bug") as error:
        patch.setattr(IMPALA, "losses", broken)
        train(tmp_path, GOOD)
    told = str(error.value)
    assert told.startswith("learner-0: Traceback") and 'raise KeyError("a bug")' in told
    assert f'File "{__file__}"' in told and "optimiser_step.py" not in told
    assert told.endswith(f"\nSee {tmp_path / 'run' / 'out.log'} for details")
    said = capsys.readouterr().out
    assert not list((tmp_path / "run").glob("*.tar")) and "Trained for" not in said
    assert "torchbeast.plot" not in said and "--xpid" not in said
    assert not (tmp_path / "latest").exists(), "there is nothing to test"
    train(tmp_path, GOOD)
    assert run_path(tmp_path / "latest") == (tmp_path / "run").resolve()
    assert "--mode test" in capsys.readouterr().out


def test_a_resumed_run_that_fails_in_its_first_update_keeps_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, GOOD)
    before = (tmp_path / "run" / "model.tar").read_bytes()
    capsys.readouterr()
    with pytest.raises(RunError, match="loss is nan"):
        train(tmp_path, BAD)
    assert (tmp_path / "run" / "model.tar").read_bytes() == before
    assert "--xpid" not in capsys.readouterr().out


def test_a_run_that_ends_with_a_usage_error_before_it_learns_leaves_no_new_folder(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError):
        train(tmp_path, GOOD, **with_model("nonesuch"))
    assert list(tmp_path.iterdir()) == []
    train(tmp_path, GOOD)
    with pytest.raises(UsageError):
        train(tmp_path, GOOD, **with_model("shallow"))
    assert (tmp_path / "run" / "model.tar").exists(), "it was not new"


def test_with_checkpoints_disabled_nothing_is_saved(tmp_path: Path) -> None:
    unsaved = {"checkpoints": CheckpointConfig(disable_checkpoint=True)}
    with pytest.raises(RunError, match="No state was saved"):
        train(tmp_path, GOOD, BAD, groups=unsaved)
    assert not list((tmp_path / "run").glob("*.tar"))


def test_resuming_with_other_settings_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, GOOD)
    train(tmp_path, GOOD)
    assert "(previously" not in capsys.readouterr().out, "nothing was changed"
    other = {
        "rollouts": RolloutConfig(batch_size=16),
        "algorithm": IMPALAConfig(optimiser=OptimiserConfig(learning_rate=0.0004)),
        "processes": ProcessesConfig(num_envs=8),
    }
    train(tmp_path, GOOD, groups=other)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"Resuming {tmp_path / 'run'} at step {2 * T * B}.") + 1
    assert lines[start : start + 3] == [
        "batch_size 16 (previously 8)",
        "num_envs 8 (previously None)",
        f"learning_rate 0.0004 from step {2 * T * B} on (was 0.00048), linear to 0 at step 100,000",
    ]


def test_a_copied_checkpoint_is_continued_with_the_random_numbers_of_the_seed_that_is_given(
    tmp_path: Path,
) -> None:
    train(tmp_path, GOOD)
    copied, seen = tmp_path / "copied.tar", []
    shutil.copy(tmp_path / "run" / "model.tar", copied)

    def source() -> EndingSource:
        seen.append(torch.get_rng_state())
        return EndingSource([rollout(GOOD)])

    for seed in (1, 2):  # the seed of the run, and another one
        flags = MonoBeastFlags(run=RunConfig(savedir=str(tmp_path), xpid="run", seed=seed))
        train_from(source, flags, resumed=copied)
    saved = checkpoints.load(copied)["rng"]["torch"]
    assert [torch.equal(state, saved) for state in seen] == [True, False]
    assert LEARNERS[-2].seed != LEARNERS[-1].seed


def test_a_checkpoint_names_its_format_and_its_network(tmp_path: Path) -> None:
    train(tmp_path, GOOD)
    with pytest.raises(RunError):
        train(tmp_path, GOOD, BAD)
    for name in ("model.tar", "last_good.tar"):
        saved = checkpoints.load(tmp_path / "run" / name)
        assert (saved["format"], saved["model"], saved["flags"]["model"]) == (1, "mlp", "auto")


def with_rewards(clipping: Any) -> dict[str, Any]:
    return {
        "groups": {"algorithm": IMPALAConfig(reward_clipping=clipping, normalise_returns=False)}
    }


@pytest.mark.parametrize("clipping", ["abs_one", "none"])
def test_the_network_gets_rewards_in_the_form_that_the_loss_uses(
    tmp_path: Path, clipping: str
) -> None:
    train(tmp_path, GOOD, **with_rewards(clipping))
    assert LEARNERS[-1].rollouts.agent.model.reward_input == clipping
    assert checkpoints.load(tmp_path / "run" / "model.tar")["reward_input"] == clipping


def test_the_network_of_a_resumed_run_gets_rewards_as_before(tmp_path: Path) -> None:
    """The weights depend on that form; the loss uses the form that the flag selects."""
    train(tmp_path, GOOD, **with_rewards("none"))
    train(tmp_path, GOOD, **with_rewards("abs_one"))
    assert LEARNERS[-1].rollouts.agent.model.reward_input == "none"
    path = tmp_path / "run" / "model.tar"
    saved = checkpoints.load(path)
    assert saved.pop("reward_input") == "none"
    checkpoints.save(path, saved)  # as before it was recorded
    train(tmp_path, GOOD, **with_rewards("none"))
    expected: str = "abs_one"
    assert LEARNERS[-1].rollouts.agent.model.reward_input == expected


def with_model(name: str) -> dict[str, Any]:
    return {"groups": {"model": ModelConfig(model=name)}}


def test_a_run_is_not_resumed_with_another_network_of_the_same_shapes(tmp_path: Path) -> None:
    train(tmp_path, GOOD, **with_model("shallow-norm"))
    with pytest.raises(
        UsageError, match="model must be shallow-norm, as in .*, not shallow: repeat"
    ):
        train(tmp_path, GOOD, **with_model("shallow"))
    train(tmp_path, GOOD, **with_model("auto"))
    saved = checkpoints.load(tmp_path / "run" / "model.tar")
    assert saved["model"] == "shallow-norm" and saved["stats"]["step"] == 2 * T * B


def test_a_run_is_not_resumed_with_other_keyword_arguments_of_its_network(tmp_path: Path) -> None:
    wide = {"model": ModelConfig(model="mlp", model_kwargs={"hidden": 24})}
    train(tmp_path, GOOD, groups=wide)
    with pytest.raises(UsageError) as error:
        train(tmp_path, GOOD, groups={"model": ModelConfig(model="mlp")})
    assert "model_kwargs must be '{\"hidden\": 24}', as in the run" in str(error.value)
    train(tmp_path, GOOD, groups=wide)
    saved = checkpoints.load(tmp_path / "run" / "model.tar")
    assert saved["flags"]["model_kwargs"] == {"hidden": 24}
    assert saved["stats"]["step"] == 2 * T * B
    assert LEARNERS[-1].rollouts.agent.model.fc.out_features == 24


@pytest.mark.parametrize("leads", [False, True])
def test_only_the_leading_rank_warns_of_a_stall(
    leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its callbacks, such as a long evaluation."""
    watched: list[Any] = []
    monkeypatch.setattr(learner_run, "start_watchdog", lambda *what: watched.append(what))
    run: Any = SimpleNamespace(_replica=Mock(leads=leads), session=Mock(), _batch_size=4)
    LearnerRun.start(run, Mock())
    assert len(watched) == leads


def test_settings_that_were_not_recorded_are_not_compared() -> None:
    """Compares the settings of each program with those of the other and of the original."""
    mono, poly = (
        flatten(MonoBeastFlags(processes=ProcessesConfig(fixed_lag=1))),
        flatten(PolyBeastFlags()),
    )
    of_command = names_with("command", PolyBeastFlags)
    assert changes({**mono, "fixed_lag": None}, mono, of_command) == {"fixed_lag": [None, 1]}
    assert changes(poly, mono, of_command) == changes(mono, poly, of_command) == {}
    before = {"entropy_cost": 0.1, "xpid": "old"}
    assert changes(before, poly, of_command) == {"entropy_cost": [0.1, 0.0006]}


def test_other_keyword_arguments_of_the_environment_are_told_whatever_their_order() -> None:
    one, same = ({"env_kwargs": dict(items)} for items in (PAIRS, reversed(PAIRS)))
    other = {"env_kwargs": {"rows": 5}}
    assert changes(one, same) == {}
    assert changes(other, one) == {"env_kwargs": ['{"rows": 5}', '{"a": {}, "rows": 4}']}
    before_the_flag: dict[str, Any] = {"env": "mine:make"}
    assert changes(before_the_flag, other) == {"env_kwargs": ["{}", '{"rows": 5}']}
    assert changes({}, other) == {}, "a new run has changed nothing"


PAIRS = [("rows", 4), ("a", {})]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_keyword_arguments_are_compared_whoever_serves_the_environment(
    before: bool, now: bool
) -> None:
    one, other = EnvSpec("mine:make", {"size": 6}), EnvSpec("mine:make", {"size": 7})
    assert changes(recorded_env(one, before), recorded_env(one, now)) == {}
    assert changes(recorded_env(one, before), recorded_env(other, now)) == {
        "env_kwargs": ['{"size": 6}', '{"size": 7}']
    }


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    state = {"model_state_dict": {"fc.weight": torch.ones(2)}, "optimizer_state_dict": {}}
    state["model_state_dict"]["mask"] = torch.tensor([0.0, -torch.inf])
    assert checkpoints.first_non_finite_tensor(state) is None
    state["optimizer_state_dict"] = {"state": {0: {"square_avg": torch.tensor([1.0, torch.inf])}}}
    assert checkpoints.first_non_finite_tensor(state) == "optimizer.state.0.square_avg"


def test_a_run_prints_its_device_precision_and_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, GOOD)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("Device: CPU, ") for line in lines) == 1


def test_a_run_that_learns_whole_batches_prints_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(IMPALA, "separable", False)
    train(tmp_path, GOOD)
    assert re.search(r"^Device: CPU, .*, whole batches$", capsys.readouterr().out, re.MULTILINE)


NO_ROOM = OSError(28, "No space left on device")
NO_PICKLE = TypeError("cannot pickle '_thread.lock' object")


@pytest.mark.parametrize(
    ("error", "said"),
    [(NO_ROOM, "no checkpoint was written to .*No space left on device"), (NO_PICKLE, "cannot p")],
)
def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(checkpoints, "write_newest", refused)
    with pytest.raises(RunError, match=said):
        train(tmp_path, GOOD)
    assert '"successful": false' in (tmp_path / "run" / "meta.json").read_text()


def test_an_error_of_the_display_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("in the display")

    closed: list[LogFiles] = []
    monkeypatch.setattr(RunDisplay, "until_the_end", broken)
    monkeypatch.setattr(LogFiles, "close", lambda files: closed.append(files))
    with pytest.raises(RunError, match="in the display"):
        train(tmp_path, GOOD)
    assert len(closed) == 1


@pytest.mark.parametrize("wanted", [False, True])
def test_compile_compiles_the_network_for_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    train(tmp_path, GOOD, groups={"hardware": HardwareConfig(compile=wanted)})
    assert len(compiled) == wanted


@pytest.mark.parametrize(("env", "model"), [("Mock", "shallow"), ("Catch", "mlp")])
def test_monobeast_learns_images_with_the_network_of_its_original(
    env: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original has no other network; Mock has Atari's observations."""
    made: list[Agent] = []

    class Run:
        def __init__(self, plan: Plan, *_: Any) -> None:
            self._plan = plan

        def train(self) -> None:
            made.append(self._plan.make_agent(ActorSpec("auto")))

    monkeypatch.setattr(monobeast, "LearnerRun", Run)
    words = ["--env", env, "--savedir", str(tmp_path)]
    assert monobeast.run(parse(MonoBeastFlags, "monobeast", words)) == 0
    assert [agent.spec.name for agent in made] == [model]


def test_rollouts_that_the_memory_cannot_hold_are_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 games of 500 steps have boards of 200 bytes: two batches and more are above 3 MB."""
    monkeypatch.setattr("torchbeast.run.learner_run.free_memory", lambda: 3_000_000)
    small = ["--env", "Catch", "--num_envs", "4", "--batch_size", "16", "--model", "mlp"]
    run = ["--unroll_length", "500", "--savedir", str(tmp_path), "--xpid", "a"]
    assert monobeast.main([*small, *run]) == 2
    said = capsys.readouterr().err
    assert "the rollout buffers need " in said and "but 3.0 MB are free" in said, said
    monkeypatch.undo()
    assert monobeast.main([*small, *run, "--unroll_length", "1000000000"]) == 2
    assert "the rollout buffers need 8288.0 GB of memory" in capsys.readouterr().err
