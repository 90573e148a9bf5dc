# SPDX-License-Identifier: Apache-2.0
"""The agents of a sweep, from its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbeast.cli.command_line import flag_names, parse, parse_known
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.errors import UsageError
from torchbeast.sweep.agents import FLAGS, AgentRun, SweepPlan, agents_of, name_of
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.search import values_of

FOLDER = Path("/runs/mine")


def agents(set_: list[str], *words: str) -> list[AgentRun]:
    config = SweepConfig(set=tuple(set_))
    return agents_of(SweepPlan(config=config, words=[*words]), FOLDER)


def test_there_is_an_agent_for_each_combination_in_order() -> None:
    found = agents(["learning_rate=0.1,0.2", "seed=1,2,3"], "--env", "Catch")
    expected = [(rate, seed) for rate in ("0.1", "0.2") for seed in ("1", "2", "3")]
    assert [tuple(agent.settings.values()) for agent in found] == expected
    assert len({agent.name for agent in found}) == 6
    assert {agent.folder for agent in found} == {FOLDER / agent.name for agent in found}


def test_an_agents_words_are_the_settings_that_its_name_says() -> None:
    found = agents(["use_lstm=true,False", "batch_size=4", "total_steps=7,9"], "--env", "Catch")
    for agent, (lstm, steps) in zip(
        found, [(True, 7), (True, 9), (False, 7), (False, 9)], strict=True
    ):
        flags = parse(MonoBeastFlags, "monobeast", agent.words)
        assert flags.model.use_lstm is lstm and flags.rollouts.batch_size == 4
        assert flags.training.total_steps == agent.total_steps == steps
        assert flags.environment.env == "Catch" and flags.run.folder == agent.folder


@pytest.mark.parametrize("words", [["--no_use_lstm", "--batch-size", "8"], ["--batch_size=2"]])
def test_a_value_of_set_counts_more_than_a_flag(words: list[str]) -> None:
    (agent,) = agents(["use_lstm=true", "batch_size=4"], "--env", "Catch", *words)
    flags = parse(MonoBeastFlags, "monobeast", agent.words)
    assert flags.model.use_lstm and flags.rollouts.batch_size == 4


def test_agents_that_differ_in_their_seed_alone_are_compared_as_one() -> None:
    first, second, third = agents(["seed=1,2", "entropy_cost=0.1"]) + agents(["seed=1"])
    assert first.compared == second.compared == {"entropy_cost": "0.1"} and third.compared == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--env", "Catch"], False),
        (["--env", "Catch", "--callback", "mine:Stop"], True),
        (["--env", "Catch", "--learning_rate_schedule", "math:sqrt"], True),
        (["--env", "mine:make"], True),
        (["--env", "envpool:Pong-v5,envpool:Breakout-v5"], False),
        (["--env", "my_envs:Mine-v0"], True),
        (["--env", "pettingzoo:mpe/simple_spread_v3"], False),
        (["--env", "my_envs.pettingzoo:make"], True),
    ],
)
def test_code_of_the_user_is_sent_to_the_nodes_of_a_cluster(
    words: list[str], expected: bool
) -> None:
    (agent,) = agents(["seed=1"], *words)
    assert agent.has_own_code is expected


def test_commas_in_brackets_are_part_of_a_value() -> None:
    values = values_of(['model_kwargs={"a": [1, 2]},{"a": [3]}', "seed=1, 2"])
    assert values == {"model_kwargs": ['{"a": [1, 2]}', '{"a": [3]}'], "seed": ["1", "2"]}


def test_names_are_folders_and_differ_where_the_settings_do() -> None:
    assert name_of({"seed": "1", "env": "Catch"}) == "seed=1,env=Catch"
    settings = [{"env": "MinAtar/Breakout-v1"}, {"env": "MinAtar_Breakout-v1"}, {"env": "x" * 300}]
    found = [name_of(each) for each in [*settings, {"env": "x" * 301}]]
    assert len(set(found)) == 4
    assert all("/" not in name and len(name) < 140 for name in found)


@pytest.mark.parametrize(
    ("set_", "words", "sentence"),
    [
        (["learning_rate"], [], "takes flags with their values"),
        (["0.1"], [], "got '0.1'"),
        (["learning_rate=0.1,"], [], "0.1, has an empty value"),
        (["learning_rate=0.1,0.1"], [], "0.1,0.1 has an empty value or one value twice"),
        (["seed=1", "seed=2"], [], "has seed twice"),
        (["learning_rate=0.1,x"], [], "could not convert string to float: 'x'"),
        (["learning_rte=0.1"], [], "Unrecognized options: --learning_rte"),
        (["batch_size=4,0"], [], "--batch_size must be at least 1, got 0"),
        (["seed=1"], ["--lerning_rate", "1"], "Unrecognized options: --lerning_rate"),
        (["lr=0.1,0.2", "learning_rate=1"], [], "lr, learning_rate, which name the same flag"),
        (["xpid=a,b"], [], "are named after their settings"),
        (["savedir=a,b"], [], "all agents of a sweep are in its folder"),
        (["seed=1"], ["--mode", "test"], "a sweep only trains"),
        (["seed=1"], ["--suppress_logs"], "one table of its agents"),
        (["seed=1"], ["--paralel", "2"], r"Did you mean --parallel\?"),
    ],
)
def test_what_the_program_or_the_sweep_refuses_is_a_sentence(
    set_: list[str], words: list[str], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        agents(set_, *words)


SHARED = ["--replay_size", "2000", "--env", "Catch"]


def test_agents_that_share_a_replay_get_its_address_when_they_start() -> None:
    config = SweepConfig(set=("seed=1",), shared_replay=True)
    plan = SweepPlan(config=config, words=SHARED)
    (found,) = agents_of(plan, FOLDER)
    assert not any("replay_service" in word for word in found.words)


@pytest.mark.parametrize(
    ("set_", "words", "sentence"),
    [
        (["seed=1,2"], [], "--replay_service needs a replay: set --replay_size too"),
        (["seed=1,2"], [*SHARED, "--checkpoint_replay"], "shared by several runs: remove one"),
        (["seed=1,2"], ["--algo", "dqn"], "shares rollouts among agents of laser"),
        (["replay_size=2000,4000"], [], "have the same replay_size, so --set cannot vary it"),
        (["env=Catch,Memory"], SHARED[:2], "have the same env, so --set cannot vary it"),
        (["preset=catch,memory"], SHARED[:2], "have the same preset, so --set cannot vary it"),
        (["buffer_size=2000,4000"], [], "have the same replay_size, so --set cannot vary it"),
        (["frame_skip=2,4"], SHARED[:2], "have the same frame_skip, so --set cannot vary it"),
        (["seed=1"], [*SHARED, "--replay_service", "x"], "use --shared_replay instead"),
    ],
)
def test_what_cannot_share_a_replay_is_a_sentence(
    set_: list[str], words: list[str], sentence: str
) -> None:
    config = SweepConfig(set=tuple(set_), shared_replay=True)
    with pytest.raises(UsageError, match=sentence):
        agents_of(SweepPlan(config=config, words=words), FOLDER)


def test_flags_of_the_sweep_are_taken_and_all_others_passed_on() -> None:
    words = ["--env", "Catch", "--set", "a=1", "b=2", "--use_lstm", "--parallel", "3", "--x=-1"]
    config, rest = parse_known(SweepConfig, "sweep", words)
    assert config.set == ("a=1", "b=2") and config.parallel == 3
    assert rest == ["--env", "Catch", "--use_lstm", "--x=-1"]


@pytest.mark.parametrize("program", FLAGS)
def test_no_flag_of_the_sweep_hides_one_of_a_program(program: str) -> None:
    """All but --savedir and --address, which the sweep passes on."""
    both = set(flag_names(SweepConfig)) & set(flag_names(FLAGS[program]))
    assert both == {"savedir", "address"} & set(flag_names(FLAGS[program]))


def test_every_agent_plays_against_versions_of_its_own() -> None:
    found = agents(["seed=1,2"], "--env", "mine:game", "--selfplay", "/versions")
    flags = [parse(MonoBeastFlags, "monobeast", agent.words) for agent in found]
    pools = [each.environment.selfplay for each in flags]
    assert pools == ["/versions/seed=1", "/versions/seed=2"]
