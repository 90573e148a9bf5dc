# SPDX-License-Identifier: Apache-2.0
"""A long run in which something fails every few seconds: sudo make soak MINUTES=60

Writes FOLDER/soak.csv, a row for each second, and FOLDER/soak.png. Ends with code 1 if a fault was
not recovered from within two minutes: all streams connected, and half of the steps/s from before
the first fault; if a rollout mixed two incarnations of an environment; or if the memory of the
learner or of the hosts grew, or the learner's threads or open files became more. With --dial_in the
hosts dial in to the learner: sudo make soak ARGS=--dial_in

Other work on the machine lowers the steps/s, too. After each fault the best of several windows
counts; a run on a machine that becomes more than half as fast for two minutes fails nevertheless.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from network import Network, Weather
from programs import Program, Workshop
from test_network_faults import ENDLESS, Lab

RECOVERED_S = 120.0  # after the end of a fault, with half a minute until it is noticed
USUAL_SHARE = 0.5  # of the steps/s before the first fault, which a run must reach again
MOST_GROWTH = 0.03  # of memory, ten times that of the learner in an hour; see `growth`
FIELDS = [
    *("seconds", "fault", "live_streams", "steps_per_s", "learner", "learner_mib", "hosts_mib"),
    *("learner_threads", "learner_files"),
]
_HOSTS = ("one", "two")

Row = dict[str, float | str]


class Recovery(NamedTuple):
    """Seconds from the end of a fault until all was connected, and until it was as fast again."""

    fault: str
    seconds: float
    until_usual: float
    share: float  # of the usual steps/s, which it then had


class Soak:
    """Injects faults, and writes down every second how the run is."""

    def __init__(self, lab: Lab, table: Path, seed: int) -> None:
        self._lab, self._table, self._rng = lab, table, random.Random(seed)
        self._began = time.monotonic()
        self._fault = ""
        self._ended = threading.Event()
        self.rows: list[Row] = []
        self.recoveries: list[Recovery] = []
        self._hosts = {name: lab.serve(name) for name in _HOSTS}
        self._learner, self._learners = self._learn(), 1
        self._everyone = lab.streams()
        self.usual = 0.0  # steps/s

    def run(self, minutes: float) -> None:
        """Injects one fault after the other until the time is up, then ends everything."""
        self.usual = statistics.median(self._rate(4.0) for _ in range(5))
        recorder = threading.Thread(target=self._record)
        recorder.start()
        try:
            while time.monotonic() < self._began + 60 * minutes:
                self._inject()
        finally:
            self._ended.set()
            recorder.join()
        self._lab.end(self._learner, *self._hosts.values())

    def _inject(self) -> None:
        faults: list[tuple[int, str, Callable[[], None]]] = [
            (4, "link cut", self._cut),
            (4, "bad weather", self._rain),
            (3, "server frozen", self._freeze),
            (1, "server killed", self._kill_server),
            (2, "host restarted", self._restart_host),
            (2, "host killed", self._kill_host),
            (1, "learner killed", self._kill_learner),
        ]
        weights = [weight for weight, _, _ in faults]
        _, self._fault, act = self._rng.choices(faults, weights)[0]
        act()
        self.recoveries.append(self._recovery())
        print(described(self.recoveries[-1]), flush=True)

    def _recovery(self) -> Recovery:
        """Waits until the run is as it was before the fault."""
        since, fault = time.monotonic(), self._fault
        while self._lab.streams() != self._everyone or self._rate(1.0) <= 0:
            _check_time(since, f"{fault}: {self._lab.row()}")
            time.sleep(0.2)
        connected = time.monotonic() - since
        self._fault = ""
        while (share := self._rate(self._rng.uniform(2.0, 6.0)) / self.usual) < USUAL_SHARE:
            _check_time(since, f"{fault}: {share:.0%} of {self.usual:.0f} steps/s")
        return Recovery(fault, connected, time.monotonic() - since, share)

    def _rate(self, seconds: float) -> float:
        """Returns the steps/s of so many seconds from now on; below 0 if the learner resumed."""
        before, since = self._lab.row()["step"], time.monotonic()
        time.sleep(seconds)
        return (self._lab.row()["step"] - before) / (time.monotonic() - since)

    def _learn(self) -> Program:
        return self._lab.learn(*ENDLESS, "--checkpoint_interval", "10")

    def _cut(self) -> None:
        host = self._rng.choice(_HOSTS)
        self._lab.net.cut(host)
        time.sleep(self._rng.choice([0.5, 2.0, 10.0, 45.0]))
        self._lab.net.heal(host)

    def _rain(self) -> None:
        self._lab.net.weather = Weather(self._rng.uniform(0, 0.1), self._rng.uniform(0, 0.05))
        time.sleep(self._rng.uniform(2.0, 10.0))
        self._lab.net.weather = Weather()

    def _freeze(self) -> None:
        server = self._rng.choice(self._lab.workshop.servers())
        server.suspend()
        time.sleep(self._rng.choice([0.5, 5.0, 40.0]))
        server.resume()

    def _kill_server(self) -> None:
        self._rng.choice(self._lab.workshop.servers()).kill()

    def _restart_host(self) -> None:
        name = self._rng.choice(_HOSTS)
        self._end(self._hosts[name])
        time.sleep(self._rng.uniform(0.0, 5.0))
        self._hosts[name] = self._lab.serve(name)

    def _kill_host(self) -> None:
        name = self._rng.choice(_HOSTS)
        self._hosts[name].kill()
        self._hosts[name] = self._lab.serve(name)

    def _kill_learner(self) -> None:
        self._learner.send(signal.SIGKILL)
        self._learner.end()
        self._learner = self._learn()
        self._learners += 1

    def _end(self, program: Program) -> None:
        program.send(signal.SIGINT)
        assert program.end(timeout=60) == 0, program.said

    def _record(self) -> None:
        before, since = self._lab.row()["step"], time.monotonic()
        with self._table.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            while not self._ended.wait(1.0):
                row, now = self._lab.row(), time.monotonic()
                self.rows.append(
                    {
                        "seconds": round(now - self._began, 1),
                        "fault": self._fault,
                        "live_streams": row.get("live_streams", 0),
                        "steps_per_s": round((row["step"] - before) / (now - since)),
                        "learner": self._learners,
                        "learner_mib": _mib([self._learner.pid]),
                        "hosts_mib": _mib([p.pid for p in self._lab.workshop.servers()]),
                        **_open_in(self._learner.pid),
                    }
                )
                before, since = row["step"], now
                writer.writerow(self.rows[-1])
                file.flush()


def _check_time(since: float, what: str) -> None:
    if time.monotonic() > since + RECOVERED_S:
        raise AssertionError(f"not recovered from {what}; load of the machine: {os.getloadavg()}")


def _mib(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:  # it is being replaced
            continue
    return round(total / 2**20, 1)


def _open_in(pid: int) -> Row:
    try:
        process = psutil.Process(pid)
        return {"learner_threads": process.num_threads(), "learner_files": process.num_fds()}
    except psutil.Error:  # it is being replaced
        return {"learner_threads": 0, "learner_files": 0}


def described(recovery: Recovery) -> str:
    fault, seconds, until_usual, share = recovery
    return (
        f"{seconds:6.1f} s to recover from: {fault}; "
        f"{share:.0%} of the usual steps/s within {until_usual:.1f} s"
    )


def growth(
    rows: list[Row], name: str, at_first: Callable[[list[float]], float] = statistics.median
) -> float:
    """Returns by which share a value is larger in the last quarter of the rows than in the first.

    Medians, because a program that has just been started takes less.
    """
    taken = [float(row[name]) for row in rows if float(row[name]) > 0]
    quarter = max(1, len(taken) // 4)
    return statistics.median(taken[-quarter:]) / at_first(taken[:quarter]) - 1


def growths(rows: list[Row]) -> dict[str, float]:
    """Returns the growth of the memory of hosts and learner, and of what the learner that lived
    longest has: each that takes a killed one's place begins with little.
    """
    learners = {row["learner"] for row in rows}
    lives = [[row for row in rows if row["learner"] == learner] for learner in learners]
    longest = max(lives, key=len)
    return {
        "the hosts": growth(rows, "hosts_mib"),
        "the learners": growth(rows, "learner_mib"),
        "the learner that lived longest": growth(longest, "learner_mib"),
        # gRPC has two or three more at times
        "its threads": growth(longest, "learner_threads", max),
        "its open files": growth(longest, "learner_files", max),
    }


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [float(row["seconds"]) / 60 for row in rows]
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(10, 7))
    for axis, name in zip(axes, ("steps_per_s", "live_streams", "learner_mib"), strict=True):
        axis.plot(minutes, [float(row[name]) for row in rows], linewidth=0.7)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    for minute, row in zip(minutes, rows, strict=True):
        if row["fault"]:
            axes[1].axvspan(minute, minute + 1 / 60, color="tab:red", alpha=0.2, linewidth=0)
    axes[-1].set_xlabel("minutes; red: a fault, until the run has recovered")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


@contextmanager
def laboratory(dials_in: bool) -> Iterator[Lab]:
    with tempfile.TemporaryDirectory() as folder, Network(["learner", *_HOSTS]) as net:
        runtime = Path(folder) / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        home = Path(folder) / "home"
        home.mkdir()
        workshop = Workshop(home, runtime)
        try:
            yield Lab(workshop, net, home, dials_in)
        finally:
            workshop.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the table and the plot")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dial_in", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with laboratory(given.dial_in) as lab:
        soak = Soak(lab, given.folder / "soak.csv", given.seed)
        soak.run(given.minutes)
    plot(soak.rows, given.folder / "soak.png")
    grown = growths(soak.rows)
    slowest = max(soak.recoveries, key=lambda recovery: recovery.seconds)
    latest = max(soak.recoveries, key=lambda recovery: recovery.until_usual)
    print(
        f"{len(soak.recoveries)} faults; the slowest recovery took {slowest.seconds:.1f} s, from: "
        f"{slowest.fault}; until {USUAL_SHARE:.0%} of {soak.usual:.0f} steps/s at most "
        f"{latest.until_usual:.1f} s, after: {latest.fault}; grown by "
        + ", ".join(f"{share:.1%} ({whose})" for whose, share in grown.items())
    )
    return int(max(grown.values()) > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
