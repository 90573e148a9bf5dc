# SPDX-License-Identifier: Apache-2.0
"""The commands that a run prints at its end work as they are printed."""

from __future__ import annotations

import re
import shlex
import signal

import pytest
from programs import Workshop, each_program

pytestmark = pytest.mark.long  # beside shorter tests of the same parts

SMALL = ["--num_envs", "2", "--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1"]
OWN = ["--env", "environments:Sized", "--env_kwargs", '{"size": 6}']


def printed(said: str, what: str) -> list[str]:
    """Returns the words of a printed command after the program's name."""
    found = re.search(rf"^{what}:\n  \S+ -m torchbeast\.\w+ (.*)$", said, re.MULTILINE)
    assert found is not None, said
    return shlex.split(found[1])


@each_program("polybeast", "monobeast")
def test_printed_commands_test_and_resume_a_run_in_a_users_environment_with_arguments(
    workshop: Workshop, program: str
) -> None:
    args = [*SMALL, *OWN, "--xpid", "a", "--total_steps", "200"]
    code, said = workshop.run(program, *args)
    assert code == 0, said
    code, tested = workshop.run(program, *printed(said, "To test"))
    assert code == 0 and "over 10 episodes" in tested, tested
    code, resumed = workshop.run(program, *printed(said, "To resume"))
    assert code == 0 and "at step 200." in resumed and "400 in total" in resumed, resumed
    changed = [line for line in resumed.splitlines() if "(previously" in line]
    assert changed == ["total_steps 400 (previously 200)"]


@pytest.mark.long
def test_printed_commands_work_for_a_run_whose_servers_were_started_apart(
    workshop: Workshop,
) -> None:
    servers = workshop.start("polybeast_env", *OWN, "--num_servers", "1", "--num_envs", "2")
    servers.wait_for("Serving 2 ")
    args = [*SMALL[2:], "--xpid", "a", "--total_steps", "200"]
    code, said = workshop.run("polybeast_learner", *args)
    assert code == 0, said
    code, resumed = workshop.run("polybeast_learner", *printed(said, "To resume"))
    assert code == 0 and "400 in total" in resumed, resumed
    assert "env_kwargs" not in resumed.partition("Saved to")[0], "they are the same"
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said
    code, tested = workshop.run("polybeast_learner", *printed(said, "To test"))
    assert code == 0 and "over 10 episodes" in tested, tested
    code, resumed = workshop.run("polybeast", "--xpid", "a", *OWN, "--total_steps", "600")
    assert code == 0 and "env_kwargs" not in resumed.partition("Saved to")[0], resumed
