# SPDX-License-Identifier: Apache-2.0
"""Dict observations in whole programs."""

from __future__ import annotations

import pytest
from programs import Workshop, each_program

pytestmark = pytest.mark.long  # beside shorter tests of the same parts

PROGRAMS = {"monobeast": ["--num_workers", "1"], "polybeast": ["--num_servers", "1"]}
SMALL = [
    "--num_envs",
    "2",
    "--batch_size",
    "4",
    "--unroll_length",
    "10",
    "--torch_threads",
    "1",
    "--xpid",
    "a",
]
IN_PIECES = ["--megabytes_at_once", "0.001"]  # a piece for each column


@each_program("polybeast", "monobeast")
def test_an_image_and_a_number_are_learnt_from_in_slices_across_time_limits(
    workshop: Workshop, program: str
) -> None:
    args = [*SMALL, *PROGRAMS[program], *IN_PIECES, "--total_steps", "400"]
    code, said = workshop.run(program, "--env", "environments:Mixed", *args)
    assert code == 0, said
    assert "Mean return 10.00" in said, said
    workshop.assert_nothing_is_left()


KEYS = ["--observation_keys", "inner/vector"]


@each_program("monobeast", "polybeast")
def test_selected_leaves_are_learnt_from_recorded_and_evaluated(
    workshop: Workshop, program: str
) -> None:
    args = [*SMALL, *PROGRAMS[program], "--env", "environments:Worded", "--total_steps", "80"]
    code, said = workshop.run(program, *args)
    assert code == 2 and "Traceback" not in said, said
    flag = "leave the entry out with --observation_keys"
    assert "observation['mission'] has dtype <U5" in said and flag in said, said
    code, said = workshop.run(program, *args, *KEYS)
    assert code == 0, said
    assert workshop.meta("a")["args"]["observation_keys"] == ["inner/vector"]
    code, said = workshop.run(program, "--mode", "test", "--xpid", "a", "--num_episodes", "2")
    assert code == 0 and "Returns: 10, 10" in said, said


@pytest.mark.long
def test_polybeast_learner_learns_and_evaluates_what_the_servers_selected(
    workshop: Workshop,
) -> None:
    env = ["--env", "environments:Worded", *KEYS]
    servers = workshop.start("polybeast_env", "--num_servers", "1", "--num_envs", "2", *env)
    servers.wait_for("Serving 2 ")
    code, said = workshop.run("polybeast_learner", *SMALL, "--total_steps", "80")
    assert code == 0, said
    code, said = workshop.run("polybeast_learner", "--mode", "test", "--xpid", "a")
    assert code == 0 and "over 10 episodes" in said, said
