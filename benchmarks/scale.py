# SPDX-License-Identifier: Apache-2.0
"""Measures how far one learner scales, with hosts that sleep instead of computing.

The hosts are generated (load_generator.cc). Build them by

    cmake -S . -B build/load -DTORCHBEAST_PYTHON=OFF -DTORCHBEAST_BENCHMARKS=ON
    cmake --build build/load --target load_generator

Each part prints its rows, and writes them to a CSV file in the folder of --results:

    cost      CPU time of a step in a learner without a network, by streams, environments per
              stream, bytes, and TLS (5 minutes)
    rate      steps/s of PolyBeast's learner, compared with the prediction (2 minutes)
    weights   CPU time of publishing weights and of loading them (1 minute)
    recovery  seconds until all streams play: at the start, after hosts or the learner were killed
              (3 minutes)
    fairness  steps of fast and of slow hosts (1 minute)
    soak      ten minutes with TLS; a tenth of the hosts is killed and replaced every minute

PYTHONPATH=. python benchmarks/scale.py cost rate [--generator build/load/load_generator]
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scale_learner
from bench.sample import cpu_seconds, family
from bench.scaling import Load, Network, predict
from figures import machine

from torchbeast.fleets.system import available_cores

Row = dict[str, Any]

# Learners are forked from a process that has imported torch already, which takes seconds.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["scale_learner"])
_PATIENCE_S = 90.0
_WARM_UP_S = 1.5
_FOLDER = Path(__file__).resolve().parent
_FRAME, _PONG = (1, 84, 84), (4, 84, 84)
_PORT = 51_000


@dataclass(frozen=True)
class Setting:
    """A fleet of generated hosts with one stream each, and how they are connected."""

    streams: int
    envs: int = 16  # per stream
    shape: tuple[int, ...] = _FRAME  # uint8
    tls: bool = False
    dials_in: bool = False
    step_ms: float | None = None  # None: such that they offer `offered` steps/s
    offered: float = 8000.0
    frame_stack: int = 1
    slow: int = 0  # hosts whose steps take four times as long

    @property
    def sleep_ms(self) -> float:
        """How long a step of a host sleeps."""
        return self.step_ms or 1000 * self.streams * self.envs / self.offered

    @property
    def frame_bytes(self) -> int:
        """Bytes that a step of one environment sends."""
        return math.prod(self.shape)

    @property
    def load(self) -> Load:
        """The load that the formula takes."""
        return Load(
            streams=self.streams,
            envs_per_stream=self.envs,
            frame_bytes=self.frame_bytes,
            step_s=self.sleep_ms / 1000,
            tls=self.tls,
        )

    def row(self) -> Row:
        """Returns the columns that describe it."""
        return {
            "streams": self.streams,
            "envs_per_stream": self.envs,
            "frame_bytes": self.frame_bytes,
            "tls": int(self.tls),
            "dials_in": int(self.dials_in),
            "step_ms": round(self.sleep_ms, 2),
        }


class Place:
    """Addresses and keys of a measurement, in a temporary folder."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self.folder = folder
        over_tcp = setting.tls or setting.dials_in
        self.address = f"localhost:{_PORT}" if over_tcp else f"unix:{folder}/s.0"
        self._tls = setting.tls
        if setting.tls and not (folder / "ca.pem").exists():
            from torchbeast import keys

            with redirect_stdout(io.StringIO()):
                assert keys.main(["--hosts", "localhost", "--folder", str(folder)]) == 0

    @property
    def found(self) -> str:
        """The address as learners are given it."""
        return self.address.removesuffix(".0") if self.address.startswith("unix:") else self.address

    def keys(self, listens: bool) -> dict[str, str]:
        """Returns the files of one end, by the names of TorchBeast's flags."""
        if not self._tls:
            return {}
        names = {"tls_cert": "server.pem", "tls_key": "server-key.pem"}
        files = (names if listens else {"tls_ca": "ca.pem"}) | {"token_file": "token"}
        return {flag: str(self.folder / file) for flag, file in files.items()}


class Process:
    """A process of the load generator: it answers each line of its stdin with a line of JSON."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the generator, and waits until it is ready."""
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def _line(self) -> str:
        assert self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            raise RuntimeError(f"{self._child.args!r} has ended with {self._child.wait()}")
        return line

    def ask(self) -> dict[str, Any]:
        """Returns its counts."""
        assert self._child.stdin is not None
        print("?", file=self._child.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def kill(self) -> None:
        """Ends it at once."""
        self._child.kill()
        self._child.wait()


class Hosts:
    """Generated hosts in one or more processes, which can be killed and started again."""

    def __init__(self, program: Path, setting: Setting, place: Place, processes: int = 1) -> None:
        self._program, self._setting, self._place = program, setting, place
        self._processes = [self._start(i, processes) for i in range(processes)]

    def _start(self, index: int, processes: int) -> Process:
        setting = self._setting
        assert processes == 1 or setting.dials_in, "servers of several processes need more ports"
        flags = {
            "hosts": setting.streams // processes,
            "envs": setting.envs,
            "step_ms": setting.sleep_ms,
            "slow": setting.slow,
            "shape": ",".join(map(str, setting.shape)),
            "frame_stack": setting.frame_stack,
            "name": f"machine-{index}",
            **self._place.keys(listens=not setting.dials_in),
        }
        how = "dial" if setting.dials_in else "serve"
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return Process([str(self._program), how, self._place.address, *words])

    def ask(self) -> dict[str, Any]:
        """Returns the sums of all counts; by_host: the steps of each host."""
        answers = [process.ask() for process in self._processes]
        hosts = [steps for answer in answers for steps in answer.pop("by_host")]
        sums = {name: sum(answer[name] for answer in answers) for name in answers[0]}
        return sums | {"by_host": hosts}

    def replace(self, count: int) -> None:
        """Kills that many processes at once, and starts others in their place."""
        for process in self._processes[:count]:
            process.kill()
        for i in range(count):
            self._processes[i] = self._start(i, len(self._processes))

    def kill(self) -> None:
        """Ends all."""
        for process in self._processes:
            process.kill()


class NeverJoined(Exception):
    """Some hosts were not played within the time limit."""


def seconds_until(question: Callable[[], bool], what: str) -> float:
    """Waits until a question is answered with yes; returns the time it took."""
    began = time.monotonic()
    while not question():
        if time.monotonic() - began > _PATIENCE_S:
            raise NeverJoined(f"{what} did not happen within {_PATIENCE_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


def until_all_play(hosts: Hosts, setting: Setting) -> float:
    """Waits until every stream is played; returns the seconds it took."""
    return seconds_until(lambda: hosts.ask()["playing"] == setting.streams, "joining")


# ---- The cost of a step -------------------------------------------------------------------------


def costs(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures a learner without a network; leaves out settings whose hosts do not join in time."""
    for setting in cost_settings()[:: arguments.every]:
        with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder:
            try:
                yield _cost(arguments, setting, Place(Path(folder), setting))
            except NeverJoined as error:
                print(f"{setting}: {error}", flush=True)


def cost_settings() -> list[Setting]:
    """Returns all settings: first those that differ in streams and environments.

    At lower rates a step costs more, because fewer steps share an inference batch.
    """
    grid = [
        Setting(streams, envs, offered=24_000 if envs > 1 else 8000)
        for envs in (1, 16, 64)
        for streams in (4, 64, 256, 1024)
        if streams * envs <= 16_384
    ]
    most = [Setting(128, 16, offered=200_000)]  # more than a learner takes in
    sizes = [Setting(64, 16, (64,), offered=24_000), Setting(64, 16, _PONG), Setting(64, 1, _PONG)]
    over_tcp = [
        Setting(64, 16, dials_in=True, offered=24_000),
        Setting(64, 16, tls=True, offered=16_000),
        Setting(64, 16, tls=True, dials_in=True, offered=16_000),
        Setting(64, 1, tls=True, dials_in=True),
        Setting(64, 16, _PONG, tls=True, dials_in=True),
        Setting(1024, 1, tls=True, dials_in=True),
        Setting(1024, 16, tls=True, dials_in=True, offered=16_000),
    ]
    return [*grid, *most, *sizes, *over_tcp]


class EmptyLearner:
    """A learner without a network, as a process; see `scale_learner.py`."""

    def __init__(self, setting: Setting, place: Place) -> None:
        """Returns when it has found its first stream."""
        listens = setting.dials_in
        address = place.address if listens else place.found
        self._pipe, theirs = _forks.Pipe()
        settings = address, listens, setting.envs, place.keys(listens)
        self._process = _forks.Process(target=scale_learner.run, args=(theirs, *settings))
        self._process.start()
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError:
            raise NeverJoined("the learner found no host") from None

    def ask(self) -> dict[str, Any]:
        """Returns what it has done and used so far."""
        self._pipe.send(None)
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.join()


def _cost(arguments: argparse.Namespace, setting: Setting, place: Place) -> Row:
    with ExitStack() as opened:
        hosts = Hosts(arguments.generator, setting, place)
        opened.callback(hosts.kill)
        learner = EmptyLearner(setting, place)
        opened.callback(learner.kill)
        joined = seconds_until(lambda: learner.ask()["streams"] == setting.streams, "joining")
        # The memory of the first rollouts is new, which is up to a third of their cost.
        rollouts = 2 * (scale_learner.UNROLL_LENGTH + 1) * setting.streams * setting.envs
        seconds_until(lambda: learner.ask()["steps"] >= rollouts, "two rollouts of each stream")
        time.sleep(_WARM_UP_S)
        # Streams that step together also complete their rollouts together.
        rollout_s = scale_learner.UNROLL_LENGTH * setting.sleep_ms / 1000
        return setting.row() | _measure(learner, hosts, max(arguments.seconds, rollout_s), joined)


def _measure(learner: EmptyLearner, hosts: Hosts, seconds: float, joined: float) -> Row:
    before, hosts_before, began = learner.ask(), hosts.ask(), time.monotonic()
    time.sleep(seconds)
    after, hosts_after, took = learner.ask(), hosts.ask(), time.monotonic() - began
    spent = {name: after[name] - before[name] for name in before}
    steps = spent["steps"]
    return {
        "steps_per_second": round(steps / took),
        "learner_us": round(spent["cpu"] / steps * 1e6, 2),
        "python_us": round(spent["python_cpu"] / steps * 1e6, 2),
        "hosts_us": round(
            (hosts_after["cpu_seconds"] - hosts_before["cpu_seconds"]) / steps * 1e6, 2
        ),
        "rows_per_batch": round(spent["rows"] / max(1, spent["batches"]), 1),
        "threads": after["threads"],
        "megabytes": round(after["megabytes"]),
        "seconds_to_join": round(joined, 1),
    }


# ---- PolyBeast's learner ------------------------------------------------------------------------


class Learner:
    """The program polybeast_learner."""

    def __init__(self, setting: Setting, place: Place, flags: Sequence[str], learners: int = 1):
        meeting = (
            ["--listen", place.address, "--connect_timeout", "300"]
            if setting.dials_in
            else ["--pipes_basename", place.found]
        )
        keys = [
            word
            for flag, file in place.keys(setting.dials_in).items()
            for word in (f"--{flag}", file)
        ]
        if setting.dials_in and not setting.tls:
            keys = ["--insecure"]
        started = [sys.executable]
        if learners > 1:
            started += ["-m", "torch.distributed.run", f"--nproc_per_node={learners}"]
        unsaved = ["--total_steps", str(10**12), "--savedir", str(place.folder)]
        unsaved += ["--disable_checkpoint", "--disable_tensorboard", "--suppress_logs"]
        self._log = open(place.folder / "learner.log", "a")  # noqa: SIM115 - closed with the process
        self._child = subprocess.Popen(
            [*started, "-m", "torchbeast.polybeast_learner", *meeting, *keys, *flags, *unsaved],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (_FOLDER.parent, _FOLDER)))},
        )

    @property
    def cpu(self) -> float:
        """CPU seconds so far."""
        return cpu_seconds(family(self._child.pid))

    @property
    def memory(self) -> Row:
        """Its threads and its memory."""
        status = Path(f"/proc/{self._child.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        megabytes = int(fields["VmRSS"].split()[0]) / 1024
        return {"threads": int(fields["Threads"]), "megabytes": round(megabytes)}

    def kill(self) -> None:
        """Ends it at once."""
        for pid in reversed(family(self._child.pid)):
            os.kill(pid, signal.SIGKILL)
        self._child.wait()
        self._log.close()


def rates(arguments: argparse.Namespace) -> Iterator[Row]:
    """Compares steps/s of PolyBeast's learner with the prediction."""
    for model, settings in rate_settings().items():
        flags = ["--model", model, "--batch_size", "32", "--unroll_length", "20"]
        network = _network_cost(flags, arguments.seconds)
        for setting, learners in settings:
            with _playing(arguments, setting, flags, learners) as (hosts, learner):
                measured = _rate(hosts, learner, 2 * arguments.seconds)
            # Hosts and learner share the cores here.
            load, cores = setting.load, available_cores() / learners
            found = predict(load, network, cores, learners, beside_us=measured["hosts_us"])
            yield (
                setting.row()
                | {"model": model, "learners": learners}
                | measured
                | {
                    "predicted": round(found.steps_per_second),
                    "predicted_us": round(found.learner_us, 1),
                    "limit": found.limit,
                    "inference_us": round(network.inference_us, 1),
                    "learning_us": round(network.learning_us, 1),
                }
            )


def rate_settings() -> dict[str, list[tuple[Setting, int]]]:
    """Returns settings and numbers of learners by network."""
    return {
        "small_net:OneLayerNet": [
            (Setting(4, 16, _PONG, step_ms=20), 1),
            (Setting(64, 1, _PONG, step_ms=50), 1),
            (Setting(64, 16, _PONG, step_ms=200), 1),
            (Setting(64, 16, _PONG, step_ms=20), 1),
            (Setting(256, 4, _PONG, step_ms=20, tls=True, dials_in=True), 1),
            (Setting(1000, 1, _PONG, step_ms=1000, tls=True, dials_in=True), 1),
            (Setting(64, 16, _PONG, step_ms=20), 2),
        ],
        "shallow": [
            (Setting(64, 1, _PONG, step_ms=200), 1),
            (Setting(64, 16, _PONG, step_ms=20), 1),
        ],
    }


def _network_cost(flags: Sequence[str], seconds: float) -> Network:
    """Measures the network alone, as `torchbeast.bench --hosts` does."""
    with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder:
        file = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "torchbeast.bench", "--env", "Mock", "--num_envs", "64"]
        measuring = ["--hosts", "1", "--repeats", "1", "--seconds", str(seconds)]
        subprocess.run(
            [*command, *flags, *measuring, "--json", str(file)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return Network(**json.loads(file.read_text())["network"])


def _rate(hosts: Hosts, learner: Learner, seconds: float) -> Row:
    before, cpu, began = hosts.ask(), learner.cpu, time.monotonic()
    time.sleep(seconds)
    after, took = hosts.ask(), time.monotonic() - began
    steps = after["steps"] - before["steps"]
    hosts_us = (after["cpu_seconds"] - before["cpu_seconds"]) / steps * 1e6
    return {
        "steps_per_second": round(steps / took),
        "learner_us": round((learner.cpu - cpu) / steps * 1e6, 1),
        "hosts_us": round(hosts_us, 1),
        **learner.memory,
    }


# ---- Other parts --------------------------------------------------------------------------------


def weights(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures the CPU time of publishing weights, and of loading them into an actor."""
    import copy

    from torchbeast.collect.weights import PublishedWeights
    from torchbeast.core.actors.registry import make_agent
    from torchbeast.core.base.specs import ActorSpec
    from torchbeast.core.envs.spaces import ArraySpec, Discrete

    for name in ("small_net:OneLayerNet", "shallow", "deep"):
        agent = make_agent(ActorSpec(name), ArraySpec((4, 84, 84), "uint8"), Discrete(6), 1)
        model, published = agent.model, PublishedWeights(agent.model)
        replica, count = copy.deepcopy(model), 200

        def spent(body: Callable[[], object], count: int = count) -> float:
            began = time.process_time()
            for _ in range(count):
                body()
            return (time.process_time() - began) / count * 1e6

        def publish(model: Any = model, published: Any = published) -> None:
            published.publish(model, published.version + 1)

        yield {
            "model": name,
            "megabytes": round(sum(p.nbytes for p in model.parameters()) / 1e6, 1),
            "publish_us": round(spent(publish)),
            "load_us": round(spent(lambda: published.refresh(replica, None))),  # noqa: B023
        }


RECOVERED = Setting(1000, 1, _PONG, tls=True, dials_in=True, step_ms=1000)
_PROCESSES = 10
_SMALL = ["--model", "small_net:OneLayerNet", "--batch_size", "32", "--unroll_length", "20"]


def recovery(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures the seconds until a thousand hosts play, after each kind of loss."""
    with _thousand(arguments) as (hosts, learners, start_learner):

        def restart() -> None:
            learners.pop().kill()
            seconds_until(lambda: hosts.ask()["playing"] == 0, "the loss of every stream")
            start_learner()

        losses: dict[str, Callable[[], None]] = {
            "start": start_learner,
            "a tenth killed": lambda: hosts.replace(1),
            "all killed": lambda: hosts.replace(_PROCESSES),
            "learner killed": restart,
        }
        for what, lose in losses.items():
            lose()
            seconds = until_all_play(hosts, RECOVERED)
            counts = hosts.ask()
            time.sleep(2)
            yield (
                RECOVERED.row()
                | {"after": what, "seconds": round(seconds, 1)}
                | {name: counts[name] for name in ("attempts", "refused", "lost")}
            )


@contextmanager
def _thousand(
    arguments: argparse.Namespace,
) -> Iterator[tuple[Hosts, list[Learner], Callable[[], None]]]:
    """Yields a thousand hosts, their learners, of which there is none yet, and what starts one."""
    running: list[Learner] = []
    with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder, ExitStack() as opened:
        place = Place(Path(folder), RECOVERED)
        hosts = Hosts(arguments.generator, RECOVERED, place, _PROCESSES)
        opened.callback(hosts.kill)

        def start() -> None:
            running.append(Learner(RECOVERED, place, _SMALL))

        @opened.callback
        def _end() -> None:
            for learner in running:
                learner.kill()

        yield hosts, running, start


def fairness(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures steps of fast and slow hosts, below and at the limit of the learner."""
    for step_ms in (200.0, 20.0):
        setting = Setting(64, 16, step_ms=step_ms, slow=16)
        with _playing(arguments, setting, _SMALL) as (hosts, _):
            before = hosts.ask()["by_host"]
            time.sleep(4 * arguments.seconds)
            after = hosts.ask()["by_host"]
        steps = [now - then for now, then in zip(after, before, strict=True)]
        slow, fast = steps[: setting.slow], steps[setting.slow :]
        of_slow = {"slow_least": min(slow), "slow_most": max(slow)}
        yield setting.row() | of_slow | {"fast_least": min(fast), "fast_most": max(fast)}


@contextmanager
def _playing(
    arguments: argparse.Namespace, setting: Setting, flags: Sequence[str], learners: int = 1
) -> Iterator[tuple[Hosts, Learner]]:
    """Yields hosts that all play, and their learner."""
    with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder, ExitStack() as opened:
        place = Place(Path(folder), setting)
        hosts = Hosts(arguments.generator, setting, place)
        opened.callback(hosts.kill)
        learner = Learner(setting, place, flags, learners)
        opened.callback(learner.kill)
        until_all_play(hosts, setting)
        time.sleep(2 * _WARM_UP_S + setting.sleep_ms / 1000)
        yield hosts, learner


def soak(arguments: argparse.Namespace) -> Iterator[Row]:
    """Runs a thousand hosts for some minutes; kills and replaces a tenth of them each minute."""
    with _thousand(arguments) as (hosts, learners, start_learner):
        start_learner()
        until_all_play(hosts, RECOVERED)
        for minute in range(arguments.minutes):
            before, began = hosts.ask()["steps"], time.monotonic()
            time.sleep(55)
            rate = (hosts.ask()["steps"] - before) / (time.monotonic() - began)
            hosts.replace(1)
            back = until_all_play(hosts, RECOVERED)
            counts = {"minute": minute, "steps_per_second": round(rate), "seconds": round(back, 1)}
            yield counts | learners[0].memory


# ---- The program --------------------------------------------------------------------------------

_WHERE = f"{machine()}, load average {os.getloadavg()[0]:.0f} before"

PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "cost": costs,
    "rate": rates,
    "weights": weights,
    "recovery": recovery,
    "fairness": fairness,
    "soak": soak,
}


def main() -> None:
    arguments = _arguments()
    print(_WHERE, flush=True)
    for name in arguments.parts:
        print(f"\n{name}", flush=True)
        try:
            _keep(PARTS[name](arguments), arguments.results / f"{name}.csv")
        except NeverJoined as error:
            print(error, flush=True)


def _keep(found: Iterable[Row], path: Path) -> None:
    """Prints rows as they come, and writes them."""
    rows: list[Row] = []
    for row in found:
        if not rows:
            print("| " + " | ".join(row) + " |", flush=True)
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
        rows.append(row)
        _write(path, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--generator", type=Path, default=Path("build/load/load_generator"))
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--every", type=int, default=1, help="measure every N-th setting of cost")
    parser.add_argument("--minutes", type=int, default=10, help="length of soak")
    parser.add_argument("--results", type=Path, default=Path("docs/results/scale"))
    return parser.parse_args()


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        print(f"# {_WHERE}", file=file)
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
