# SPDX-License-Identifier: Apache-2.0
"""The flags of Atari games, from the command line to the processes that play."""

from __future__ import annotations

import pytest
from programs import Workshop, each_program

from torchbeast.run import checkpoint as checkpoints

pytestmark = pytest.mark.long  # beside shorter tests of the same parts

pytest.importorskip("ale_py")

PROGRAMS = {"monobeast": ["--num_workers", "1"], "polybeast": ["--num_servers", "1"]}
SMALL = [
    "--model=mlp",
    "--num_envs=2",
    "--batch_size=2",
    "--unroll_length=5",
    "--total_steps=20",
    "--torch_threads=1",
    "--xpid=a",
]
OPTIONS = ["--full_action_space", "--sticky_actions=0.5", "--frame_skip=40"]
GAME = ["--env", "ALE/Pong-v5", *OPTIONS]


def check_what_is_left(workshop: Workshop) -> None:
    """Asserts the recorded flags, and that all environments had all actions of the console."""
    recorded = workshop.meta("a")["args"]
    assert recorded["full_action_space"] and recorded["frame_skip"] == 40
    assert recorded["sticky_actions"] == 0.5
    saved = checkpoints.load(workshop.run_folder("a") / "model.tar")
    assert saved["flags"]["frame_skip"] == 40
    assert len(saved["model_state_dict"]["policy.bias"]) == 18


@each_program("monobeast", "polybeast")
def test_atari_flags_reach_the_processes_and_the_checkpoint(
    workshop: Workshop, program: str
) -> None:
    code, said = workshop.run(program, *GAME, *SMALL, *PROGRAMS[program])
    assert code == 0, said
    check_what_is_left(workshop)


@pytest.mark.long
def test_polybeast_learner_records_the_atari_flags_of_its_servers(workshop: Workshop) -> None:
    servers = workshop.start("polybeast_env", *GAME, "--num_servers=1", "--num_envs=2")
    servers.wait_for("Serving 2 ")
    code, said = workshop.run("polybeast_learner", *SMALL)
    assert code == 0, said
    check_what_is_left(workshop)


@each_program("polybeast", "monobeast")
def test_an_atari_flag_is_refused_for_other_environments(workshop: Workshop, program: str) -> None:
    code, said = workshop.run(program, "--env", "Catch", "--frame_skip=2", *SMALL)
    assert code == 2 and "Traceback" not in said, said
    assert "--frame_skip needs an Atari game, and Catch is not one: remove --frame_skip" in said
