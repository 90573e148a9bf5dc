# SPDX-License-Identifier: Apache-2.0
"""Token and private keys are in no output, file or process that others may see.

Whole programs over TLS, while a server is replaced, with all that they start.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from background import wait_for
from keys_of_tests import TOKEN, Keys
from ports import free_port
from programs import LEARNING, SOON, Program, Workshop
from test_dial_in import host, of_door
from test_machines import of_learner, of_servers
from test_several_learners import SMALL, TORCHRUN, learners

ENDLESS = [*SMALL, "--total_steps", str(10**8), "--checkpoint_interval", "1"]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Returns files outside of the folder in which nothing may be found."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where ranks have folders of their own
    return Keys(tmp_path / "keys")


def secrets(keys: Keys) -> list[str]:
    """Returns the token, and the lines of the private keys."""
    texts = [Path(key).read_text() for key in (keys.key, keys.client_key)]
    lines = [line for text in texts for line in text.splitlines() if "-----" not in line]
    assert len(lines) == 6 and Path(keys.token).read_text() == TOKEN
    return [TOKEN, *lines]


def shown_by_processes(workshop: Workshop) -> Iterator[tuple[str, str]]:
    """Yields what ps shows of each process of the programs, and its environment."""
    for process in workshop.processes():
        environment = process.info["environ"]
        title = " ".join([process.name(), *process.info["cmdline"]])
        yield f"{process.pid}: {title}", "\0".join([title, *environment, *environment.values()])


def kept_in_files(workshop: Workshop, keys: Keys) -> Iterator[tuple[str, str]]:
    """Yields every file of the test but the keys themselves."""
    for path in workshop.folder.rglob("*"):
        if path.is_file() and keys.folder not in path.parents:
            yield str(path), path.read_bytes().decode("latin-1")


def assert_secret(keys: Keys, shown: Iterator[tuple[str, str]]) -> list[str]:
    """Returns where it has looked."""
    looked = dict(shown)
    told = [where for where, text in looked.items() for one in secrets(keys) if one in text]
    assert told == []
    return list(looked)


def replace_a_server(workshop: Workshop, program: Program) -> None:
    workshop.servers()[0].kill()
    program.wait_for("Starting a replacement")
    wait_for(workshop.servers)  # it is said before it is done


def assert_nothing_is_told(workshop: Workshop, keys: Keys, programs: Sequence[Program]) -> None:
    """Ends the programs, and looks at all that they have left."""
    wait_for((workshop.run_folder("a") / "model.tar").exists, SOON)
    for program in programs:
        program.send(signal.SIGTERM)
        program.end(timeout=60)
        assert len(program.said) > 50
    assert_secret(keys, ((f"output of {each.pid}", each.said) for each in programs))
    files = {Path(name).name for name in assert_secret(keys, kept_in_files(workshop, keys))}
    assert {"out.log", "meta.json", "model.tar", "logs.csv"} <= files
    named = workshop.meta("a")["args"]["token_file"]
    assert named == keys.token, "the name of the file is no secret"


@pytest.mark.long
def test_servers_and_learners_of_torchrun_tell_no_secret(workshop: Workshop, keys: Keys) -> None:
    address = f"127.0.0.1:{free_port()}"
    counts = ["--num_servers", "1", "--num_envs", "4", "--listen", address]
    servers = workshop.start("polybeast_env", "--env", "Catch", *counts, *of_servers(keys))
    servers.wait_for("Serving 4 ")
    where = ["--env_servers", address, *of_learner(keys)]
    both = workshop.start("polybeast_learner", *ENDLESS, *where, by=TORCHRUN)
    both.wait_for(LEARNING)
    replace_a_server(workshop, servers)
    ranks = [learner.pid for learner in learners(both)]
    looked = assert_secret(keys, shown_by_processes(workshop))
    assert len(ranks) == 2 and {f"{rank}" for rank in ranks} <= {
        one.split(":")[0] for one in looked
    }
    assert any("server_main" in title for title in looked), looked
    assert_nothing_is_told(workshop, keys, [both, servers])


@pytest.mark.long
def test_a_host_that_dials_in_and_its_learner_tell_no_secret(
    workshop: Workshop, keys: Keys
) -> None:
    port = free_port()
    one = host(workshop, keys, port, 1, 4, "Catch")
    one.wait_for("Serving 4 ")
    learner = workshop.start("polybeast_learner", *ENDLESS, *of_door(keys, port))
    learner.wait_for(LEARNING)
    replace_a_server(workshop, one)
    assert_secret(keys, shown_by_processes(workshop))
    assert_nothing_is_told(workshop, keys, [learner, one])
