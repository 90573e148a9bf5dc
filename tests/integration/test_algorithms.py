# SPDX-License-Identifier: Apache-2.0
"""A user's own algorithm trains through every program, given only by name."""

from __future__ import annotations

import re

import pytest
from programs import Workshop

ALGO = "examples.advantage_actor_critic:AdvantageActorCritic"
CARTPOLE = ["--preset", "cartpole", "--algo", ALGO, "--total_steps", "60000", "--seed", "1"]
SHARED = ["--xpid", "own", "--torch_threads", "1"]
RANDOM_RETURN = 22  # mean of a policy that draws its actions evenly
LONG = 200.0


def assert_the_run_has_learnt(workshop: Workshop, program: str) -> None:
    """Evaluates the checkpoint, which records its algorithm."""
    assert workshop.meta("own")["args"]["algo"] == ALGO
    code, said = workshop.run(program, "--mode", "test", *SHARED, "--num_episodes", "20")
    assert code == 0, said
    match = re.search(r"Mean (-?[\d.]+), median", said)
    assert match, said
    assert float(match[1]) > 4 * RANDOM_RETURN


@pytest.mark.long
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
def test_the_example_learns_cartpole(workshop: Workshop, program: str) -> None:
    code, said = workshop.run(program, *SHARED, *CARTPOLE, timeout=LONG)
    assert code == 0, said
    assert_the_run_has_learnt(workshop, program)


@pytest.mark.long
def test_the_example_learns_cartpole_from_servers_in_another_terminal(workshop: Workshop) -> None:
    servers = workshop.start(
        "polybeast_env", "--env", "CartPole-v1", "--num_servers", "2", "--num_envs", "16"
    )
    servers.wait_for("Serving 16 ")
    code, said = workshop.run("polybeast_learner", *SHARED, *CARTPOLE, timeout=LONG)
    assert code == 0, said
    assert_the_run_has_learnt(workshop, "polybeast_learner")
