# SPDX-License-Identifier: Apache-2.0
"""Data-parallel learners, in processes that torchrun starts.

    rank 0   sends its settings and checkpoint to all ranks, so that all start equal;
             writes log and checkpoints, shows the display
    others   have a temporary folder, and show only warnings

They take every optimiser step together (`core/update/torch_ranks.py`), and agree on each batch in a
roll call:

    rank 0   source --> a batch is there --+                                     +--> update --> ...
    rank 1   source --> not yet -----------+-- roll call: all ready, or a stop --+--> update --> ...

Before each update every rank reports whether its batch is ready, and whether it wants to end the
run. If all are ready, all update. If one ends, all end after the same update. A rank that waits for
its batch answers every second, so a roll call takes about a second at most, and a rank that does
not answer is lost. The reports also contain what the log and the display show about all ranks, and
the options that rank 0 has given its environments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch

from torchbeast.collect import joint
from torchbeast.collect.batch_taker import BatchTaker
from torchbeast.collect.config import ReplayConfig, RolloutConfig
from torchbeast.collect.contract import LostStream, Source, TooFewStreams
from torchbeast.core.algos.config import recorded
from torchbeast.core.base.checks import names_with
from torchbeast.core.storages.batch import Batch
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep, UpdateResult
from torchbeast.core.update.torch_ranks import RankGone, TorchRanks, store_of_torchrun
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import Launch
from torchbeast.fleets.waiting import WAIT_S, running_time, waiting_for
from torchbeast.reporting.prometheus import MetricsConfig
from torchbeast.reporting.run_folder import CHECKPOINT
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.assemble import Assembled
from torchbeast.run.config import HardwareConfig
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.plan import Plan
from torchbeast.run.training import DONE, ENOUGH
from torchbeast.seeds import seed_of

SILENT_S = 90.0
"""Seconds after which a rank counts as lost, if it does not answer a roll call or does not join an
optimiser step of the others. Every rank has a batch at the start of such a step, so this limits how
much longer the slowest rank may compute its gradients than the fastest."""

MEET_S = 300.0
"""Seconds within which all ranks must have started."""

PATIENCE_S = 1.0
"""Seconds that a rank waits for its batch before it answers that the batch is not ready."""

_RUN = "run"  # the run of rank 0, announced once it has read the checkpoint
_LOOK_S = 0.1  # between two polls for that announcement
_BATCH = "batch"  # the number of the batch that rank 0 is about to announce
_MOMENT_S = 0.001  # between two polls for the end of callbacks, which usually take no time
# Files from which rank 0 resumes. Of logs.csv it only matters whether it is empty.
_FILES = (CHECKPOINT, "meta.json", "logs.csv")
_LONGEST = 2**20  # bytes that are sent of a file other than the checkpoint


class Replica:
    """This process among the learners of a run. Used by one thread at a time."""

    def __init__(self, launch: Launch, ranks: TorchRanks) -> None:
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size  # on this machine
        self.on_one_machine = launch.local_size == launch.size
        self.leads = launch.rank == 0  # writes the log and the checkpoints
        self.ranks = ranks

    @contextmanager
    def flags(self, words: Sequence[str], parse: Callable[[Sequence[str]], Any]) -> Iterator[Any]:
        """Yields the flags with which this rank starts or resumes the run of rank 0.

        parse: parses a command line. The other ranks receive the run's name, its seed and the files
        that record its settings, in a folder that is removed when the block ends.
        """
        if self.leads:
            flags = parse(words)
            run = dataclasses.replace(flags.run, seed=EarlierRun().seed(flags.run.seed))
            files = _files(run.folder)
            self.ranks.tell(_RUN, json.dumps({"xpid": run.xpid, "seed": run.seed}))
            for name in _FILES:
                self.ranks.broadcast(files.get(name, b""))
            yield dataclasses.replace(flags, run=run)
            return
        # Polls, because a large checkpoint may take rank 0 longer than SILENT_S.
        message = json.loads(self.ranks.told(_RUN, lambda: time.sleep(_LOOK_S)))
        same = [*words, "--xpid", message["xpid"], "--seed", str(message["seed"])]
        with tempfile.TemporaryDirectory(prefix=f"torchbeast-rank{self.rank}-") as folder:
            own_folder = Path(folder) / message["xpid"]
            own_folder.mkdir()
            for name in _FILES:
                if content := self.ranks.broadcast(b""):
                    (own_folder / name).write_bytes(content)
            yield parse([*same, "--savedir", folder])

    def check_same(self, flags: Any) -> None:
        """Raises UsageError in every rank unless all have the flags of rank 0, apart from those
        that belong to a command or to a machine.
        """
        of_this_rank = names_with("command", flags) | names_with("rank", flags)
        shared = {k: v for k, v in recorded(flags).items() if k not in of_this_rank}
        messages = self.ranks.gather({"settings": json.loads(json.dumps(shared, default=str))})
        first, *others = (message["settings"] for message in messages)
        for rank, other in enumerate(others, 1):
            for name in sorted(k for k in {*first, *other} if first.get(k) != other.get(k)):
                raise UsageError(
                    f"all learners need the same flags, but --{name} is {first.get(name)} in rank "
                    f"0 and {other.get(name)} in rank {rank}: start them with the same command"
                )

    def check_can_share(
        self, rollouts: RolloutConfig, replay: ReplayConfig, hardware: HardwareConfig
    ) -> None:
        """Raises UsageError for settings that several learners cannot have."""
        size, batch_size = self.size, rollouts.batch_size
        if batch_size % size:
            raise UsageError(
                f"batch_size {batch_size} is divided among all learners: use a multiple of {size}"
            )
        if replay.replay_size:
            raise UsageError(
                f"replay_size {replay.replay_size} works with one learner only: remove it, or "
                "start one learner"
            )
        threads = hardware.num_learner_threads
        if threads not in (None, 1):
            raise UsageError(
                f"num_learner_threads {threads} works with one learner only: remove it"
            )

    def share_of(self, plan: Plan) -> Plan:
        """Returns the plan of this rank, with its part of the batch and the files it writes."""
        config = plan.learner
        batch_size = config.rollouts.batch_size // self.size
        learner = dataclasses.replace(
            config,
            rollouts=dataclasses.replace(config.rollouts, batch_size=batch_size),
            hardware=self._hardware(config.hardware),
        )
        plan = dataclasses.replace(plan, learner=learner)
        if self.leads:
            return plan
        return dataclasses.replace(
            plan,
            checkpoints=dataclasses.replace(plan.checkpoints, disable_checkpoint=True),
            display=dataclasses.replace(plan.display, suppress_logs=True),
            loggers=(),
            metrics=MetricsConfig(),  # off
            callbacks=(),
            becomes_latest=False,
        )

    def _hardware(self, config: HardwareConfig) -> HardwareConfig:
        """Returns the hardware settings of this rank; auto and cuda give each rank its own GPU."""
        device = config.device
        if device in ("auto", "cuda") and not config.stays_on_cpu and torch.cuda.is_available():
            gpus = torch.cuda.device_count()
            if gpus < self.local_size:
                raise UsageError(
                    f"{self.local_size} learners on this machine need a GPU each, and there are "
                    f"{gpus}: start {gpus} (torchrun --nproc_per_node), or use --device cpu, or "
                    "--device cuda:0 for all"
                )
            device = f"cuda:{self.local_rank}"
        return dataclasses.replace(config, device=device, num_learner_threads=1)

    def add_where(self, device: torch.device) -> None:
        """Chooses where gradients are added: on the GPUs if every rank has its own, else on the
        CPU, because nccl refuses two ranks on one GPU. device: of this rank's network.
        """
        messages = self.ranks.gather({"host": socket.gethostname(), "device": str(device)})
        places = {(message["host"], message["device"]) for message in messages}
        on_gpus = all(where.startswith("cuda") for _, where in places)
        is_own = on_gpus and len(places) == len(messages)
        self.ranks.device = device if is_own else torch.device("cpu")

    def equalise(self, made: Assembled) -> None:
        """Copies the state of rank 0 into the learner, and chooses where gradients are added."""
        step = made.optimiser_step
        self.add_where(next(step.algo.actor.parameters()).device)
        state = self.ranks.broadcast(joint.saved_state(step) if self.leads else b"")
        if not self.leads:
            joint.load_state(step, state)
        made.weights.publish(made.agent.model, step.version)

    def seed(self, root: int) -> int:
        """Returns this rank's variant of a seed; rank 0 uses the seed itself."""
        return root if self.leads else seed_of(root, "rank", self.rank)

    def meet(self, number: int, has_ended: Callable[[], bool]) -> None:
        """Waits until rank 0 has called its callbacks and written its files before this batch. They
        may take longer than SILENT_S, for example an evaluation, or a checkpoint on a slow disk.
        """

        def pause() -> bool:
            time.sleep(_MOMENT_S)
            return has_ended()

        if self.leads:
            self.ranks.tell(_BATCH, str(number))
        else:  # the ranks are never more than a batch apart
            self.ranks.told(_BATCH, pause, math.inf, before=str(number - 1))


def _files(folder: Path) -> dict[str, bytes]:
    """Returns the newest checkpoint of a run, or else the files that record its settings."""
    if checkpoints.existing(newest := folder / CHECKPOINT):
        return {CHECKPOINT: checkpoints.load_newest(newest).path.read_bytes()}
    files = {}
    for name in _FILES[1:]:
        with suppress(OSError), open(folder / name, "rb") as file:
            files[name] = file.read(_LONGEST)
    return files


@contextmanager
def replica(launch: Launch) -> Iterator[Replica]:
    """Waits for the other ranks. At the end, tells ranks that still wait how this one ended.

    Ranks other than 0 show only warnings, and errors with the number of their rank.
    """
    with _named(launch.rank):
        with waiting_for(f"the other learners of this run, {launch.size} in all"):
            store = store_of_torchrun(MEET_S)
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            ranks = TorchRanks(store, launch.rank, launch.size, device=device, timeout_s=SILENT_S)
        try:
            yield Replica(launch, ranks)
        except BaseException as error:
            ranks.leave(_reason(error))
            raise
        ranks.leave("it has ended")


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Prefixes errors with the rank, and hides its output except for warnings."""
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            yield
        except (UsageError, RunError) as error:
            error.args = (f"rank {rank}: {error}",)  # the same object, with all its attributes
            raise


def _reason(error: BaseException) -> str:
    """Returns why this rank ends, for the other ranks; "" if it ends because of another rank.

    An unexpected error includes its traceback, because the log of this rank is removed with it.
    """
    cause = error.__cause__ or error
    if isinstance(cause, RankGone):
        return ""
    if isinstance(cause, (UsageError, RunError, NonFiniteError)):
        return str(error)
    if isinstance(cause, Exception):
        return "".join(traceback.format_exception(cause)).strip()
    return str(error) or type(error).__name__


class RankedLearner(joint.JointLearner):
    """Yields a rank's batches, each when all ranks have one, and updates with all ranks.

    The same thread iterates over `batches` and updates, so it takes part in every roll call and in
    every update. All of its waits end: a roll call by its time limit, the source by the supervisor.
    """

    def __init__(self, source: Source, replica: Replica, step: OptimiserStep[Any]) -> None:
        """step: joins its gradients with the other ranks."""
        super().__init__(step)
        self._source, self._replica, self._rank = source, replica, replica.rank
        self.num_bytes = source.num_bytes
        self._taking, self._number = BatchTaker(source.batches), 0  # number of the last batch
        self._ready_since: float | None = None  # since when this rank has its batch
        # With their ranks, in the last roll call.
        self._others: Sequence[tuple[int, joint.BatchReport]] = ()
        self._env_options: Mapping[str, Any] | None = None  # that the environments were given last

    def start(self, supervisor: Supervisor) -> None:
        """Starts this rank's source."""
        self._supervisor = supervisor
        self._source.start(supervisor)
        supervisor.on_close(self.close)
        supervisor.start_thread("batches", self._taking.run)

    def close(self) -> None:
        """Ends the wait for a batch here, but not in the source. May be called again."""
        self._taking.close()

    def batches(self) -> Iterator[joint.JointBatch]:
        """Yields batches until a rank ends the run. Update before you ask for the next batch."""
        try:
            while (batch := self._next()) is not None:
                yield batch
        except RankGone as error:
            # Even at the end: if a rank is killed, torchrun stops the others by a signal.
            self._supervisor.fail_at_end("", error)

    def update(self, batch: joint.JointBatch) -> UpdateResult:
        """Updates with the batches of all ranks."""
        try:
            return self._step.update(batch.own)
        except RankGone as error:
            self._supervisor.fail_at_end("", error)
            raise

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives the environments of this rank options; the other ranks give theirs the options of
        rank 0 at the next roll call.
        """
        self._env_options = options
        self._source.set_env_options(options)

    def status(self) -> Mapping[str, float]:
        """Returns queue lengths and counts of all ranks together."""
        return joint.total([self._source.status(), *(report.status for _, report in self._others)])

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that the sources of all ranks have spent, by stage."""
        return joint.total(
            [self._source.seconds(), *(report.seconds for _, report in self._others)]
        )

    def hanging(self) -> str:
        """Describes workers and ranks that hang, or returns ""."""
        others = [f"rank {rank}: {r.hanging}" for rank, r in self._others if r.hanging]
        return "; ".join(filter(None, [self._source.hanging(), *others, self._late()]))

    def _late(self) -> str:
        """Names the ranks that have kept this one waiting for over WAIT_S, or returns ""."""
        late = [str(rank) for rank, report in self._others if not report.ready]
        since = self._ready_since
        if since is None or not late or running_time() - since < WAIT_S:
            return ""
        return f"the other learners of the run wait for a batch of rank {', '.join(late)}"

    def lost_streams(self) -> list[LostStream]:
        """Returns the lost streams of all ranks."""
        streams = [_of_rank(self._rank, stream) for stream in self._source.lost_streams()]
        return streams + [_of_rank(rank, s) for rank, report in self._others for s in report.away]

    def _next(self) -> joint.JointBatch | None:
        """Holds roll calls until all ranks are ready; returns None if the run ends."""
        self._number += 1
        self._taking.ask(self._number)
        own_batch: Batch | None = None
        self._ready_since = None
        # Not `ended`: rank 0 may still be in the callbacks of the last update.
        supervisor = self._supervisor
        self._replica.meet(
            self._number, lambda: supervisor.failure is not None or supervisor.has_signal
        )
        while self._supervisor.failure is None:  # else it leaves, and the others notice
            if own_batch is None:
                own_batch = self._taking.wait(self._number, PATIENCE_S)
                self._ready_since = None if own_batch is None else running_time()
            reports = self._call(own_batch)
            if any(report.stop for report in reports):
                self._stop(reports)
                return None
            if all(report.ready for report in reports):
                return joint.JointBatch(reports, own_batch)
        return None

    def _call(self, own_batch: Batch | None) -> list[joint.BatchReport]:
        """Takes part in a roll call; returns the reports in the order of ranks."""
        report = joint.report_of(self._source, own_batch, self.version)._replace(
            stop=self._supervisor.reason or "",
            away=[[*stream] for stream in self._source.lost_streams()],
            hanging=self._source.hanging(),
            env_options=self._env_options,
        )
        messages = self._replica.ranks.gather(report._asdict())
        reports = [_read(rank, message) for rank, message in enumerate(messages)]
        self._others = [ranked for ranked in enumerate(reports) if ranked[0] != self._rank]
        options = reports[0].env_options
        if self._rank and options not in (None, self._env_options):
            self.set_env_options(options)
        return reports

    def _stop(self, reports: Sequence[joint.BatchReport]) -> None:
        """Ends the run with the reason of the first rank that ends it."""
        rank, reason = next((rank, r.stop) for rank, r in enumerate(reports) if r.stop)
        if not self._supervisor.ended and reason != DONE:
            print(f"Stopped by {reason} in rank {rank}.", flush=True)
        # After ENOUGH the hosts of this rank may end too.
        self._supervisor.stop(ENOUGH if reason == ENOUGH else f"{reason} in rank {rank}")


def _read(rank: int, message: Mapping[str, Any]) -> joint.BatchReport:
    """Reads the report of a rank; raises RunError if it is not valid."""
    try:
        return joint.BatchReport(**message)
    except TypeError as error:
        raise RunError(
            f"rank {rank} sent an invalid answer to the roll call ({error}): start all learners "
            "with the same version of TorchBeast"
        ) from None


def _of_rank(rank: int, fields: Sequence[Any]) -> LostStream:
    """Returns a lost stream of a rank; fields: of LostStream, possibly from JSON."""
    where, seconds, short, why = fields
    short = short and TooFewStreams(*short)._replace(of=f" of rank {rank}")
    return LostStream(where, seconds, short, why)
