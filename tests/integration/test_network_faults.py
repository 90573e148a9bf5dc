# SPDX-License-Identifier: Apache-2.0
"""A learner and two hosts of servers on a network that misbehaves; the run goes on.

No rollout may mix two incarnations of an environment or lack a step of one: the algorithm looks at
every rollout and would end the run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import network
import pytest
from background import wait_for
from network import Network, Weather
from programs import BUSY_S, MARKED, ONE_INCARNATION, SOON, Program, Workshop

from torchbeast.reporting.log_files import read_fields, read_logs

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "-"),
]

NOTICED_S = 30.0 + BUSY_S  # by keepalive
BACK_S = 10.0 + BUSY_S  # an attempt whose packets were lost, and a pause
PORT = 50051


@pytest.fixture
def net() -> Iterator[Network]:
    with Network(["learner", "one", "two"]) as made:
        yield made


class Lab:
    """A learner on one host, and one server with two streams on each of the two others.

    dials_in: the servers dial in to the learner instead of being dialled by it.
    """

    def __init__(
        self, workshop: Workshop, net: Network, tmp_path: Path, dials_in: bool = False
    ) -> None:
        self.workshop, self.net, self._dials_in = workshop, net, dials_in
        self._row: dict[str, float] = {}
        self.token = tmp_path / "token"
        self.token.write_text("a-token-of-this-test")
        self.token.chmod(0o600)

    def serve(self, host: str) -> Program:
        """Starts the servers of a host."""
        where = "--learner" if self._dials_in else "--listen"
        address = self._address("learner" if self._dials_in else host)
        args = [where, address, "--insecure", "--token_file", str(self.token)]
        counts = ["--num_servers", "1", "--num_envs", "2"]
        servers = self.workshop.start(
            "polybeast_env", "--env", MARKED, *counts, *args, by=self.net.hosts[host].words
        )
        servers.wait_for("Serving")
        return servers

    def learn(self, *args: str) -> Program:
        """Starts or resumes the learner."""
        if self._dials_in:
            where = ["--listen", self._address("learner"), "--num_envs", "4"]
        else:
            where = ["--env_servers", f"{self._address('one')},{self._address('two')}"]
        where += ["--insecure", "--token_file", str(self.token)]
        small = ["--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1"]
        learner = self.workshop.start(
            "polybeast_learner",
            "--xpid",
            "a",
            *ONE_INCARNATION,
            *small,
            *where,
            *args,
            by=self.net.hosts["learner"].words,
        )
        learner.wait_for(r"steps ([1-9][\d,]*) of ")
        return learner

    def _address(self, host: str) -> str:
        return f"{self.net.hosts[host].address}:{PORT}"

    def row(self) -> dict[str, float]:
        """Returns the last whole row of the log, or that of the call before if there is none."""
        folder = self.workshop.run_folder("a")
        with (folder / "logs.csv").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            line = file.read().decode().rpartition("\n")[0].rpartition("\n")[2]
        cells = [] if line.startswith("#") else line.split(",")
        found = {k: float(v) for k, v in zip(read_fields(folder), cells, strict=False) if v}
        self._row = found if "live_streams" in found else self._row
        return self._row

    def streams(self) -> float:
        return self.row().get("live_streams", -1)

    def wait_for_steps(self, more: int) -> None:
        """Waits until the learner has learnt so many steps more."""
        before = self.row()["step"]
        wait_for(lambda: self.row()["step"] > before + more, SOON)

    def end(self, *programs: Program) -> None:
        """Ends programs as Ctrl-C does; nothing may be left."""
        for program in programs:
            program.send(signal.SIGINT)
            assert program.end() == 0, program.said
        self.workshop.assert_nothing_is_left()


@pytest.fixture
def lab(workshop: Workshop, net: Network, tmp_path: Path) -> Lab:
    return Lab(workshop, net, tmp_path)


ENDLESS = ["--total_steps", str(10**9)]


def test_a_link_that_is_cut_costs_its_streams_until_it_is_healed(lab: Lab) -> None:
    one, two = lab.serve("one"), lab.serve("two")
    learner = lab.learn(*ENDLESS)
    everyone = lab.streams()
    lab.net.cut("two")
    wait_for(lambda: lab.streams() == everyone / 2, NOTICED_S)
    lab.wait_for_steps(1_000)
    lab.net.heal("two")
    wait_for(lambda: lab.streams() == everyone, BACK_S)
    lab.wait_for_steps(1_000)
    lab.end(learner, one, two)


def test_packets_that_are_lost_late_or_out_of_order_cost_only_time(lab: Lab) -> None:
    one, two = lab.serve("one"), lab.serve("two")
    learner = lab.learn(*ENDLESS)
    lab.net.weather = Weather(loss=0.05, delay_s=0.02)
    lab.wait_for_steps(1_000)
    assert lab.net.dropped > 20
    lab.net.weather = Weather()
    lab.wait_for_steps(1_000)
    assert lab.row()["lost_streams"] == 0
    lab.end(learner, one, two)


def test_a_frozen_server_is_away_until_it_goes_on(lab: Lab) -> None:
    one, two = lab.serve("one"), lab.serve("two")
    learner = lab.learn(*ENDLESS)
    everyone = lab.streams()
    frozen = lab.workshop.servers()[1]
    frozen.suspend()
    wait_for(lambda: lab.streams() == everyone / 2, NOTICED_S)
    lab.wait_for_steps(1_000)
    frozen.resume()
    wait_for(lambda: lab.streams() == everyone, BACK_S)
    lab.end(learner, one, two)


def test_a_learner_that_is_killed_goes_on_from_its_checkpoint(lab: Lab) -> None:
    one, two = lab.serve("one"), lab.serve("two")
    learner = lab.learn(*ENDLESS, "--checkpoint_interval", "1")
    checkpoint = lab.workshop.run_folder("a") / "model.tar"
    wait_for(checkpoint.exists)
    lab.wait_for_steps(1_000)
    learner.kill()
    saved = lab.workshop.saved_step()
    again = lab.learn(*ENDLESS)
    assert f"Resuming {lab.workshop.run_folder('a')} at step {saved:,}." in again.said
    rows = [row["step"] for row in read_logs(lab.workshop.run_folder("a"))]
    assert rows == sorted(rows), "rows after the checkpoint were left out when it was resumed"
    lab.wait_for_steps(1_000)
    lab.end(again, one, two)
