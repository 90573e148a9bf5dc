# SPDX-License-Identifier: Apache-2.0
"""Flags: all original ones exist, and a wrong one is refused in one sentence."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from later import later

from torchbeast import monobeast, polybeast
from torchbeast.cli.command_line import (
    _OF_NETWORKS,
    _SUGGESTED,
    TITLES,
    as_typed,
    flag_names,
    flatten,
    parse,
    run_with,
)
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.collect.config import MAX_FIXED_LAG, ProcessesConfig
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.registry import config_of
from torchbeast.core.base.specs import ModelConfig
from torchbeast.errors import RunError, UsageError
from torchbeast.export import ExportFlags
from torchbeast.fleets.system import available_cores
from torchbeast.plot import PlotFlags
from torchbeast.servers.config import FleetConfig, ServersConfig
from torchbeast.status import StatusFlags

ORIGINAL_LEARNER_FLAGS = [
    "env",
    "mode",
    "xpid",
    "disable_checkpoint",
    "savedir",
    "num_envs",
    "total_steps",
    "batch_size",
    "unroll_length",
    "num_learner_threads",
    "disable_cuda",
    "use_lstm",
    "entropy_cost",
    "baseline_cost",
    "discounting",
    "reward_clipping",
    "learning_rate",
    "alpha",
    "momentum",
    "epsilon",
    "grad_norm_clipping",
    "pipes_basename",
    "num_inference_threads",
    "num_actions",
    "max_learner_queue_size",
    "write_profiler_trace",
]
ORIGINAL_DEFAULTS = {
    "total_steps": 100_000,
    "batch_size": 8,
    "unroll_length": 80,
    "entropy_cost": 0.0006,
    "baseline_cost": 0.5,
    "discounting": 0.99,
    "learning_rate": 0.00048,
    "alpha": 0.99,
    "momentum": 0.0,
    "epsilon": 0.01,
    "grad_norm_clipping": 40.0,
    "savedir": "~/logs/torchbeast",
    "mode": "train",
}
PROGRAMS = {
    "polybeast": PolyBeastFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
    "polybeast_env": PolyBeastEnvFlags,
    "raybeast": RayBeastFlags,
}
WRONG = [
    (["--num_episodes", "20"], "--num_episodes is for --mode test"),
    (["stray"], "Unrecognized options: stray."),
    (["--learnig_rate", "0.1"], "--learnig_rate, 0.1. Did you mean --learning_rate? See"),
    (["--batch-sise=3"], "--batch_sise=3. Did you mean --batch_size? See"),
    (["--tau", "1"], "--tau, 1. --target_rate is a setting of the algorithms dqn, sac, td3. See"),
    (["--seeds", "1", "--num_env", "4"], "4. Did you mean --seed and --num_envs? See"),
    (["--n_steps", "20"], "--n_steps, 20. Did you mean --unroll_length? See"),
    (["--no-anneal-lr"], "--no_anneal_lr. Did you mean --learning_rate_schedule? See"),
    (["--hidden=64"], "--hidden=64. Did you mean --model_kwargs '{\"hidden\": ...}'? See"),
    (["--train-frequency", "4"], "4. Did you mean --replay_ratio? See"),
    (["--target-network-frequency", "4"], "--target_period is a setting of the algorithms dqn,"),
    (["--num_envs", "some"], "--num_envs: must be an integer such as 8 or 1e6, got some."),
    (["--algo=ppo", "--num_envs", "0"], "--num_envs must be at least 1, got 0."),
    (["--lr", "0"], "--learning_rate must be greater than 0, got 0.0."),
    (["--algo=ppo", "--clip_parm", "1"], "--clip_parm, 1. Did you mean --clip_param? See"),
    (["--no_such_flag", "3"], "--no_such_flag, 3. See"),
    (["--batch_size"], "Missing value for argument '--batch_size'."),
    (["--mode", "dance"], "invalid choice 'dance' for argument '--mode'."),
    (["--discounting", "1.5"], "--discounting must be between 0 and 1, got 1.5."),
    (["--discounting", "nan"], "--discounting must be between 0 and 1, got nan."),
    (["--num_servers", "8", "--num_envs", "4"], "use at most --num_servers 4, or set --num_env"),
    (["--max_learner_queue_size", "1"], "use at least --batch_size 8."),
    (["--xpid", "a/b"], "--xpid must be a plain name"),
    (["--xpid", "latest"], "--xpid must be a plain name"),
    (["--frame_skip", "0"], "--frame_skip must be at least 1, got 0."),
    (["--sticky_actions", "1"], "--sticky_actions must be at least 0 and below 1, got 1.0."),
    (["--sampled"], "--sampled is for --mode test"),
    (["--use_lstm=maybe"], "--use_lstm: must be true or false, got maybe."),
    (["--use_lstm", "maybe"], "Unrecognized options: maybe. See"),
    (["--follow"], "--follow evaluates a run while it trains: use --mode test, not train."),
    (["--mode", "test_render", "--xpid", "a", "--follow"], "use --mode test, not test_render."),
    (["--mode", "test", "--xpid", "a", "--follow", "--checkpoint", "b"], "remove --checkpoint b."),
    (["--checkpoint", "b.tar"], "--checkpoint is for --mode test"),
]


TLS = ["--tls_cert", "c", "--tls_key", "k"]
CLIENT = ["--tls_ca", "a"]
UNSAFE = {
    "polybeast_env": [
        (["--listen", "a:1"], "--listen needs --tls_cert and --tls_key"),
        (["--listen", "a:1", *TLS], "--listen needs --token_file or --tls_client_ca, else anyone"),
        (["--listen", "a:1", *TLS, "--insecure"], "--insecure means TCP without TLS: remove it"),
        (["--listen", "a:1", "--tls_cert", "c"], "--tls_cert and --tls_key belong together"),
        (["--listen", "a:1", "--tls_client_ca", "a", "--token_file", "t"], "needs --tls_cert and"),
        (["--listen", "a:1", "--pipes_basename", "unix:/a"], "use one of them"),
        (["--pipes_basename", "0.0.0.0:50051"], "--pipes_basename must begin with unix:"),
        (["--token_file", "t"], "they need --listen HOST:PORT"),
        (["--insecure"], "they need --listen HOST:PORT"),
        (TLS, "they need --listen HOST:PORT"),
        (["--learner", "a:1", "--listen", "b:1"], "--listen and --learner are different ways"),
    ],
    "polybeast_learner": [
        (["--env_servers", "a:1"], "--env_servers needs --tls_ca, the servers' CA certificate"),
        (["--env_servers", "a:1", "--token_file", "t"], "--env_servers needs --tls_ca"),
        (["--env_servers", "a:1", *CLIENT, "--insecure"], "--insecure means TCP without TLS"),
        (["--env_servers", "a:1", *CLIENT, "--tls_cert", "c"], "belong together: set both"),
        (["--env_servers", "a:1", *TLS], "--env_servers needs --tls_ca, the servers' CA certif"),
        (["--env_servers", "a:1", "--pipes_basename", "unix:/a"], "use one of them"),
        (["--token_file", "t"], "they need --env_servers"),
        (["--insecure"], "they need --env_servers"),
        (["--listen", "a:1", "--env_servers", "b:1"], "--env_servers and --listen are different"),
    ],
}
SAFE = {
    "polybeast_env": [
        ["--listen", "a:1", *TLS, "--token_file", "t"],
        ["--listen", "a:1", *TLS, "--tls_client_ca", "a"],
        ["--listen", "a:1", "--insecure"],
        ["--listen", "a:1", "--insecure", "--token_file", "t"],
    ],
    "polybeast_learner": [
        ["--env_servers", "a:1", *CLIENT],
        ["--env_servers", "a:1", *CLIENT, *TLS, "--token_file", "t"],
        ["--env_servers", "a:1", "--insecure"],
    ],
}


@pytest.mark.parametrize(
    ("program", "args", "sentence"), [(p, *case) for p, cases in UNSAFE.items() for case in cases]
)
def test_connections_between_machines_are_protected_unless_one_asks_otherwise(
    program: str, args: list[str], sentence: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse(PROGRAMS[program], program, args)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("program", "args"), [(p, args) for p, cases in SAFE.items() for args in cases]
)
def test_protected_connections_are_accepted(program: str, args: list[str]) -> None:
    parse(PROGRAMS[program], program, args)


def test_every_flag_of_the_original_exists() -> None:
    assert set(ORIGINAL_LEARNER_FLAGS) <= set(flatten(PolyBeastLearnerFlags()))


def test_polybeast_has_the_flags_of_servers_and_learner() -> None:
    own = set(flatten(PolyBeastFlags()))
    assert {"num_servers", "num_envs", "env", "pipes_basename", "use_lstm"} <= own


def test_the_defaults_are_those_of_the_original() -> None:
    flags = flatten(PolyBeastFlags())
    assert {name: flags[name] for name in ORIGINAL_DEFAULTS} == ORIGINAL_DEFAULTS


def test_polybeast_learner_has_the_same_defaults_but_takes_any_served_environment() -> None:
    flags = flatten(PolyBeastLearnerFlags())
    assert {name: flags[name] for name in ORIGINAL_DEFAULTS} == ORIGINAL_DEFAULTS


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_has_a_help_text(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(PROGRAMS[program], program, ["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    names = flag_names(PROGRAMS[program])
    assert names
    for group in dataclasses.fields(PROGRAMS[program]):
        assert f"{TITLES.get(group.name, group.name)} options" in shown
    for name in names:
        text = shown.split(f"--{name}", 1)[1]
        assert text.split("(default", 1)[0].strip(" │\n─╮╰╯╭"), f"--{name} has no help"


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_group_of_flags_begins_with_the_docstring_of_its_config(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(PROGRAMS[program], program, ["--help"])
    shown = capsys.readouterr().out
    groups = vars(PROGRAMS[program]())
    assert groups
    for name, config in groups.items():
        text = shown.split(f"{TITLES.get(name, name)} options", 1)[1]
        words = " ".join(text.replace("─", "-").strip("-│╭╮╰╯ \n").split())
        docstring = " ".join(str(inspect.getdoc(config)).split())
        assert words.startswith(docstring[:60]), name


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_fills_its_lines_and_names_one_default_of_each_flag(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(PROGRAMS[program], program, ["--help"])
    lines = re.findall(r"^[│ ] (--\w.*?| +\S.*?) *│?$", capsys.readouterr().out, re.MULTILINE)
    entries = "\n".join(lines).split("\n--")
    assert len(entries) > 10
    for entry in entries:
        assert len(re.findall(r"Default: |\(default: ", entry)) <= 1
        for line, following in pairwise(entry.splitlines()[1:]):
            assert len(line) + 1 + len(following.split()[0]) > 80 - len("│  │"), line


@pytest.mark.parametrize("program", ["compare", "keys", "status", "suite", "sweep.__main__"])
def test_no_line_of_help_is_wider_than_the_terminal(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        importlib.import_module(f"torchbeast.{program}").main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("kind", [PolyBeastLearnerFlags, PlotFlags, ExportFlags])
def test_every_line_of_help_fits_the_terminal(
    kind: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(kind, "plot", ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: python -m torchbeast.plot [-h]")
    assert max(map(len, lines)) == 80


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--use_lstm", True),
        ("--no_use_lstm", False),
        ("--use_lstm --no_use_lstm", False),
        ("--use_lstm False", False),
        ("--no_use_lstm --use_lstm=true", True),
    ],
)
def test_the_last_of_two_opposite_flags_counts_whatever_the_default(
    words: str, value: bool
) -> None:
    for preset in ([], ["--preset", "memory"]):  # that preset has an LSTM
        flags = parse(MonoBeastFlags, "monobeast", [*preset, *words.split()])
        assert flags.model.use_lstm is value


@pytest.mark.parametrize(("args", "sentence"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_flag_is_refused_in_one_sentence(args: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(PolyBeastFlags, "polybeast", args)
    message = str(error.value)
    assert sentence in message
    assert "\n" not in message and "│" not in message


def test_missing_arguments_are_named_without_their_help() -> None:
    with pytest.raises(UsageError, match=r"^missing RUN, FILE\. See --help\.$"):
        parse(ExportFlags, "export", [])


OTHERS = [
    ("monobeast", ["--num-actors", "6"], {"num_envs": 6}),
    ("polybeast", ["--n_envs", "6", "--num_workers", "3"], {"num_envs": 6, "num_servers": 3}),
    ("raybeast", ["--num_workers", "3"], {"num_workers": 3}),
    ("monobeast", ["--lr", "1e-4", "--gamma=0.9"], {"learning_rate": 1e-4, "discounting": 0.9}),
    ("monobeast", ["--algo=PPO", "--clip_coef", "0.1"], {"algo": "ppo", "clip_param": 0.1}),
    ("monobeast", ["--algo=ppo", "--num-minibatches", "8"], {"num_mini_batch": 8}),
    ("monobeast", ["--env-id", "Catch"], {"env": "Catch"}),
    ("monobeast", ["--algo", "ppo", "--no-norm-adv"], {"normalise_advantages": False}),
    ("monobeast", ["--algo=dqn", "--learning-starts", "50"], {"learn_start": 50}),
    ("monobeast", ["--optimizer", "adam", "--normalize-returns"], {"normalise_returns": True}),
    ("monobeast", ["--algo", "ppo", "--no-normalize-advantages"], {"normalise_advantages": False}),
    ("monobeast", ["--buffer_size", "1e4"], {"algo": "laser", "replay_size": 10_000}),
    ("monobeast", ["--preset", "CartPole-DQN"], {"preset": "cartpole-dqn", "algo": "dqn"}),
    ("monobeast", ["--xpid", "compile", "--use_lstm"], {"xpid": "compile", "use_lstm": True}),
]


@pytest.mark.parametrize(("program", "words", "expected"), OTHERS)
def test_names_of_earlier_versions_and_of_other_libraries_work_in_any_case(
    program: str, words: list[str], expected: dict[str, Any]
) -> None:
    found = flatten(parse({"monobeast": MonoBeastFlags, **PROGRAMS}[program], program, words))
    assert {name: found[name] for name in expected} == expected


def test_a_built_in_network_may_be_typed_in_any_case_and_ones_own_may_not() -> None:
    assert ModelConfig(model="Shallow-Norm").spec.name == "shallow-norm"
    assert ModelConfig(model="my_net:MyNet").spec.name == "my_net:MyNet"


def test_a_terminal_without_box_characters_gets_the_same_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The encoding of stdout, which capsys changes, decides how tyro draws its box."""
    with pytest.raises(UsageError) as error:
        parse(PolyBeastFlags, "polybeast", ["--num_envs", "0"])
    assert str(error.value) == "--num_envs must be at least 1, got 0. See --help."


@pytest.mark.parametrize(
    ("sentence", "typed"),
    [
        ("num_servers 8: give num_envs 4", "--num_servers 8: give --num_envs 4"),
        ("give --num_envs 4", "give --num_envs 4"),
        ("a num_envs_more 4", "a num_envs_more 4"),
        ("model must be one that the model knows", "--model must be one that the model knows"),
        ("max_num_envs is no flag", "max_num_envs is no flag"),
        ("/logs/num_envs/model.tar is damaged", "/logs/num_envs/model.tar is damaged"),
        ("takes 'num_envs', got num_envs=2", "takes 'num_envs', got num_envs=2"),
    ],
)
def test_names_of_fields_become_flags_and_plain_words_stay(sentence: str, typed: str) -> None:
    assert as_typed(sentence, PolyBeastFlags) == typed


def test_only_wrong_usage_names_flags_and_not_what_fails_in_a_run() -> None:
    def failing_with(error: Exception) -> Any:
        def run(_: PolyBeastFlags) -> int:
            raise error

        return run

    for kind, expected in ((UsageError, "fewer --num_envs"), (RunError, "fewer num_envs")):
        with pytest.raises(kind, match=f"^{expected}$"):
            run_with(PolyBeastFlags(), failing_with(kind("fewer num_envs")))


def test_an_integer_may_be_typed_with_an_exponent() -> None:
    flags = parse(PolyBeastFlags, "polybeast", ["--total_steps", "1.5e6", "--seed", "1e3"])
    assert (flags.training.total_steps, flags.run.seed) == (1_500_000, 1_000)
    with pytest.raises(UsageError, match="--total_steps: must be an integer such as 8 or 1e6"):
        parse(PolyBeastFlags, "polybeast", ["--total_steps", "1.5"])


def test_flags_with_dashes_mean_the_same_before_and_after_the_algorithm_is_known() -> None:
    flags = parse(MonoBeastFlags, "monobeast", ["--replay-size", "1000", "--replay-kl-threshold=1"])
    assert (flags.defaults.algo, flags.replay.replay_size) == ("laser", 1_000)


def test_the_originals_name_of_a_flag_is_accepted_in_both_spellings() -> None:
    for words in (["--num_threads", "3"], ["--num_threads=3"]):
        assert parse(PolyBeastFlags, "polybeast", words).hardware.num_learner_threads == 3


FIXED_LAG_WRONG = [
    (["--fixed_lag", "-1"], "--fixed_lag must be at least 0, got -1."),
    (["--max_lag", "0"], "--fixed_lag 1 is above --max_lag 0, so almost no data"),
    (["--fixed_lag", str(MAX_FIXED_LAG + 1)], "--fixed_lag must be at most 509, got 510."),
    (
        ["--num_envs", "5", "--num_workers", "2"],
        "--num_envs 5 must be a multiple of --num_workers 2, because --fixed_lag is 1: change one",
    ),
    (
        ["--batch_size", "3"],
        "--batch_size 3 must be a multiple of the 2 environments of a worker (--num_envs 4 / "
        "--num_workers 2), because --fixed_lag is 1: use --batch_size 2, or set --fixed_lag None",
    ),
    (
        ["--algo", "ppo", "--fixed_lag", "0", "--num_envs", "3", "--batch_size", "64"],
        "because --fixed_lag is 0, the default of ppo: use --batch_size 63, or set --fixed_lag",
    ),
    (["--num_learner_threads", "2"], "--num_learner_threads 2, or give --fixed_lag None."),
]


@pytest.mark.parametrize(("args", "sentence"), FIXED_LAG_WRONG)
def test_an_impossible_fixed_lag_is_refused_in_one_sentence(args: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(MonoBeastFlags, "monobeast", ["--fixed_lag", "1", *args])
    assert sentence in str(error.value) and "\n" not in str(error.value)


_GIVEN = ("observation_space", "action_space", "shared_body", "use_lstm")  # by flags of their own


def test_what_is_suggested_for_flags_of_other_libraries_exists() -> None:
    known = {name for kind in (*PROGRAMS.values(), MonoBeastFlags) for name in flatten(kind())}
    known |= {*flag_names(config_of("dqn"))}
    assert {text.partition(" ")[0] for text in _SUGGESTED.values()} <= known
    assert not {*_SUGGESTED} & known, "no flag needs a suggestion"
    options = set(inspect.signature(MLPNet).parameters)
    assert {*_OF_NETWORKS} == options - {*_GIVEN}


def test_a_switch_takes_no_value() -> None:
    flags = parse(PolyBeastFlags, "polybeast", ["--use_lstm", "--disable_cuda", "--num_envs=6"])
    assert flags.model.use_lstm and flags.hardware.disable_cuda and flags.fleet.num_envs == 6


def test_the_number_of_servers_follows_from_cores_and_environments() -> None:
    assert FleetConfig(num_envs=1).servers() == 1
    assert FleetConfig(num_envs=10_000).servers() == available_cores()
    assert FleetConfig(num_envs=10, num_servers=10).servers() == 10


def with_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the configs see a machine with this number of cores."""
    for module in ("collect.config", "servers.config"):
        monkeypatch.setattr(f"torchbeast.{module}.available_cores", lambda: cores)


@pytest.mark.parametrize(
    ("cores", "environments", "processes"),
    [(1, 16, 1), (2, 32, 2), (4, 64, 4), (6, 48, 6), (8, 64, 8), (48, 48, 48), (100, 100, 100)],
)
def test_the_number_of_environments_follows_from_the_cores_unless_it_is_given(
    cores: int, environments: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(cores, monkeypatch)
    mono, poly, served = ProcessesConfig(), FleetConfig(), ServersConfig()
    assert (mono.environments(), mono.processes()) == (environments, processes)
    assert (poly.environments(), poly.servers()) == (environments, processes)
    assert (served.environments(), served.servers()) == (environments, processes)
    assert ProcessesConfig(num_envs=45).environments() == 45
    assert FleetConfig(num_envs=45).environments() == 45
    assert ProcessesConfig(num_workers=2).environments() == 32
    assert ProcessesConfig(num_buffers=10, num_workers=1).environments() == 10
    assert ServersConfig(num_servers=10).environments() == 10


def test_a_reproducible_run_has_the_same_environments_on_any_number_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for cores in (1, 2, 16):
        with_cores(cores, monkeypatch)
        processes = parse(MonoBeastFlags, "monobeast", ["--fixed_lag", "1"]).processes
        found.append((processes.environments(), processes.processes()))
    assert found == [(4, 2)] * 3


@pytest.mark.parametrize(
    ("words", "batch_size"),
    [
        (["--num_envs", "1024"], 256),
        (["--num_actors=100"], 32),
        (["--num_envs", "32"], 8),
        (["--num_envs", "4"], 8),
        ([], 16),  # eight cores have 64 environments
        (["--num_envs", "1024", "--batch_size", "8"], 8),
        (["--num_envs", "1024", "--preset", "cartpole"], 16),
        (["--num_envs", "64", "--algo", "dqn"], 32),
        (["--num_envs", "64", "--algo", "ppo"], 64),
        (["--num_envs", "64", "--fixed_lag", "1", "--num_workers", "8"], 8),
        (["--num_envs", "48", "--replay_size", "100000"], 16),
        (["--num_workers", "100"], 32),
        (["--num_buffers", "30"], 8),
        (["--num_envs", "1024", "--fixed_lag", "None"], 256),
        (["--num_envs=1e3"], 256),
    ],
)
def test_the_batch_follows_from_the_environments_unless_something_else_decides(
    words: list[str], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the expected policy lag of a new run is 4 versions or less."""
    monkeypatch.setattr("torchbeast.collect.config.available_cores", lambda: 8)
    assert parse(MonoBeastFlags, "monobeast", words).rollouts.batch_size == batch_size


def test_a_default_batch_fits_the_queue() -> None:
    for words, batch_size in (
        (["--num_servers", "128"], 32),
        (["--num_envs", "64", "--max_learner_queue_size", "8"], 8),
        (["--num_envs", "64", "--max_learner_queue_size", "12"], 12),
        (["--num_envs", "64", "--max_learner_queue_size", "32"], 16),
    ):
        assert parse(PolyBeastFlags, "polybeast", words).rollouts.batch_size == batch_size


def test_a_learner_alone_keeps_its_batch_because_servers_decide_about_environments() -> None:
    flags = parse(PolyBeastLearnerFlags, "polybeast_learner", ["--num_envs", "1024"])
    assert flags.rollouts.batch_size == 8


POOL = ["--env", "envpool:CartPole-v1"]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (POOL, (256, 64, 20)),
        ([*POOL, "--num_envs", "32"], (32, 8, 20)),
        ([*POOL, "--batch_size", "8", "--unroll_length", "80"], (256, 8, 80)),
        ([*POOL, "--algo", "ppo"], (64, 64, 32)),
        ([*POOL, "--algo", "dqn"], (8, 32, 4)),
        ([*POOL, "--fixed_lag", "1"], (None, 8, 80)),
        ([*POOL, "--num_buffers", "40"], (None, 8, 80)),
        ([*POOL, "--fixed_lag", "None"], (256, 64, 20)),
        ([*POOL, "--algo", "ppo", "--fixed_lag", "0"], (64, 64, 32)),
        ([*POOL, "--preset", "cartpole"], (16, 16, 20)),
        ([*POOL, "--preset", "acrobot-impala"], (16, 8, 80)),
    ],
)
def test_a_pool_has_more_environments_and_shorter_rollouts(
    words: list[str], sizes: tuple[int, int, int]
) -> None:
    flags = parse(MonoBeastFlags, "monobeast", words)
    rollouts = flags.rollouts
    assert (flags.processes.num_envs, rollouts.batch_size, rollouts.unroll_length) == sizes


@pytest.mark.parametrize("program", [monobeast, polybeast])
def test_a_run_records_the_number_of_environments_that_was_chosen(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run then has as many, also on a machine with other cores."""
    pytest.importorskip("libtorchbeast")
    with_cores(3, monkeypatch)
    recorded: dict[str, Any] = {}

    def session(folder: Path, settings: dict[str, Any]) -> None:
        recorded.update(settings)
        raise UsageError("far enough")

    monkeypatch.setattr(program, "session", session)
    assert program.main(["--xpid", "a"]) == 2 and "far enough" in capsys.readouterr().err
    assert recorded["num_envs"] == 48


@pytest.mark.parametrize(
    "words",
    [
        ["plot", "--help"],
        later(["polybeast_learner", "--help"]),
        later(["polybeast_learner", "--preset", "help"]),
    ],
)
def test_help_of_which_nobody_reads_the_end_ends_in_order(words: list[str]) -> None:
    command = [sys.executable, "-m", f"torchbeast.{words[0]}", *words[1:]]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_wrong_flag_ends_a_program_in_one_line_before_torch_is_imported() -> None:
    code = """
import runpy, sys
try:
    runpy.run_module("torchbeast.polybeast", run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code, "--no_such_flag"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "polybeast: Unrecognized options: --no_such_flag. See --help.\n"


ORIGINAL_COMMAND = (
    "--env PongNoFrameskip-v4 --num_actors 45 --total_steps 30000000 --learning_rate 0.0004 "
    "--epsilon 0.01 --entropy_cost 0.01 --batch_size 4 --unroll_length 80 --num_buffers 60 "
    "--num_threads 4 --xpid example"
)


def test_the_originals_command_of_monobeast_is_accepted_unchanged() -> None:
    flags = parse(MonoBeastFlags, "monobeast", ORIGINAL_COMMAND.split())
    assert flags.processes.buffers() == 60, "rollouts of one environment, as each actor had one"
    assert flags.hardware.num_learner_threads == 4 and flags.run.xpid == "example"
    words = ORIGINAL_COMMAND.replace("--", "").replace("num_actors", "num_envs").split()
    words = [word.replace("num_threads", "num_learner_threads") for word in words]
    said = dict(zip(words[::2], words[1::2], strict=True))
    settings = flatten(flags)
    assert {name: type(value)(said[name]) for name, value in settings.items() if name in said} == {
        name: settings[name] for name in said
    }


THE_FIRST_RAYBEASTS_COMMAND = (
    "--env PongNoFrameskip-v4 --num_learner_threads 4 --num_actors 45 --total_steps 200000000 "
    "--learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 4 --unroll_length 79 "
    "--episodes_for_avg 100 --suppress_logs --discounting 0.99 --use_lstm --use_resnet"
)


def test_the_command_of_the_first_raybeast_is_taken_as_it_is() -> None:
    settings = flatten(parse(RayBeastFlags, "raybeast", THE_FIRST_RAYBEASTS_COMMAND.split()))
    expected = {
        "env": "PongNoFrameskip-v4",
        "num_learner_threads": 4,
        "num_envs": 45,
        "total_steps": 200_000_000,
        "learning_rate": 0.0004,
        "epsilon": 0.01,
        "entropy_cost": 0.01,
        "batch_size": 4,
        "unroll_length": 79,
        "episodes_for_avg": 100,
        "suppress_logs": True,
        "discounting": 0.99,
        "use_lstm": True,
        "model": "deep",
    }
    assert {name: settings[name] for name in expected} == expected
    words = [word.removeprefix("--") for word in THE_FIRST_RAYBEASTS_COMMAND.split()]
    assert {"use_resnet", "num_actors", *expected} - {"model", "num_envs"} <= set(words), (
        "each flag of it is looked at"
    )


def test_buffers_are_counted_in_rollouts_of_one_environment() -> None:
    assert MonoBeastFlags().processes.buffers() == 2 * MonoBeastFlags().processes.environments()
    with pytest.raises(UsageError, match="45 environments need as many .*--num_buffers is 44"):
        parse(MonoBeastFlags, "monobeast", ["--num_envs", "45", "--num_buffers", "44"])


def test_status_names_whose_certificate_it_needs() -> None:
    with pytest.raises(UsageError, match="--learner needs --tls_ca, the learner's CA certificate"):
        parse(StatusFlags, "status", ["--learner", "a:1"])


def test_the_scale_of_returns_belongs_to_the_learner() -> None:
    words = ["--env", "Catch,Mock", "--task_returns", "0", "1", "0", "9"]
    with pytest.raises(UsageError, match="--task_returns .* give it to polybeast_learner"):
        parse(PolyBeastEnvFlags, "polybeast_env", words)


def test_a_learners_scale_of_returns_is_checked_and_counts_in_an_evaluation_too() -> None:
    words = ["--mode", "test", "--xpid", "a", "--task_returns", "0", "25", "0", "80"]
    flags = parse(PolyBeastLearnerFlags, "polybeast_learner", words)
    assert flags.environment.asked.options.task_returns == (0, 25, 0, 80)
    with pytest.raises(UsageError, match="task_returns must be pairs of a lower and a higher"):
        parse(PolyBeastLearnerFlags, "polybeast_learner", ["--task_returns", "1"])


def test_status_asks_servers_or_a_learner() -> None:
    with pytest.raises(UsageError, match="HOST:PORT names servers: use one of them"):
        parse(StatusFlags, "status", ["a:1", "--learner", "b:1", "--insecure"])
