# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments on the command line."""

from __future__ import annotations

from typing import Any

import pytest
from bench.end_to_end import arguments
from bench.flags import BenchFlags

from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.envs import EnvSpec
from torchbeast.errors import UsageError

GIVEN = ["--env", "Catch", "--env_kwargs", '{"rows": 6, "more": [1, null]}']


@pytest.mark.parametrize("program", [MonoBeastFlags, PolyBeastFlags, PolyBeastEnvFlags, BenchFlags])
def test_every_program_that_makes_environments_has_env_kwargs(program: Any) -> None:
    flags = parse(program, "any", GIVEN)
    assert flags.environment.spec == EnvSpec("Catch", {"rows": 6, "more": [1, None]})
    assert parse(program, "any", []).environment.spec.kwargs == {}


@pytest.mark.parametrize("program", [MonoBeastFlags, PolyBeastFlags, BenchFlags])
def test_every_program_that_makes_networks_has_model_kwargs(program: Any) -> None:
    flags = parse(program, "any", ["--model_kwargs", '{"hidden": 64}'])
    assert flags.model.model_kwargs == {"hidden": 64}
    assert parse(program, "any", []).model.model_kwargs == {}


@pytest.mark.parametrize("word", ["{size: 8}", "[8]", "8", "size=8", '"size"'])
def test_a_value_that_is_no_json_object_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(MonoBeastFlags, "monobeast", ["--env_kwargs", word])
    said = str(error.value)
    assert "--env_kwargs: must be a JSON object such as '{\"size\": 8}', got " in said
    assert said.endswith(f"{word}. See --help.")


def test_bench_passes_keyword_arguments_to_the_program_that_it_measures() -> None:
    flags = parse(BenchFlags, "bench", [*GIVEN, "--model_kwargs", '{"hidden": 64}'])
    measured = parse(PolyBeastFlags, "polybeast", arguments(flags))
    assert measured.environment.spec == flags.environment.spec
    assert measured.model == flags.model
