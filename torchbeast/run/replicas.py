# SPDX-License-Identifier: Apache-2.0
"""Several learners that learn as one, in processes that torchrun starts.

    rank 0   its command line and its checkpoint --> all ranks begin with the same
             log, checkpoints, display
    others   a folder that ends with them; only warnings are shown

They take every optimiser step together (`core/update/torch_ranks.py`) and agree before each update
on going on (`roll_call.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchbeast.collect.config import ReplayConfig, RolloutConfig
from torchbeast.collect.contract import Source
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.core.update.torch_ranks import RankGone, TorchRanks, store_of_torchrun
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.system import Launch
from torchbeast.fleets.waiting import waiting_for
from torchbeast.gradients.joint import load, saved
from torchbeast.reporting.metrics import MetricsConfig
from torchbeast.reporting.run_folder import CHECKPOINT, OF_ONE_COMMAND, RunConfig
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import HardwareConfig
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.learner_run import RunSettings
from torchbeast.run.roll_call import RankedLearner
from torchbeast.seeds import seed_of

SILENT_S = 90.0
"""Seconds after which a rank that answers no roll call, or stays away from an optimiser step that
the others take, is lost. Such a step begins with a batch in every rank, so this limits by how much
the slowest may compute its gradients longer than the fastest."""

MEET_S = 300.0
"""Seconds in which all ranks must have started."""

_RUN = "run"  # that rank 0 begins or resumes, once it has read the checkpoint
_LOOK_S = 0.1  # between two looks whether it has
# Flags that may differ between ranks: of one command, and of one machine.
_OF_ONE_RANK = (*OF_ONE_COMMAND, "pipes_basename", "torch_threads", "device")


class Replica:
    """This process among the learners of a run. Used by one thread at a time."""

    def __init__(self, launch: Launch, ranks: TorchRanks) -> None:
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size  # on this machine
        self.on_one_machine = launch.local_size == launch.size  # this one
        self.leads = launch.rank == 0  # keeps the log and the checkpoint
        self.ranks = ranks

    @contextmanager
    def words(
        self, words: Sequence[str], run_of: Callable[[Sequence[str]], RunConfig]
    ) -> Iterator[list[str]]:
        """Yields the command line with which this rank resumes or begins the run of rank 0.

        run_of: parses a command line; called in rank 0 only. The other ranks get the run's name,
        seed and checkpoint, in a folder that is removed when the block ends.
        """
        run: dict[str, Any]
        checkpoint = b""
        if self.leads:
            asked = run_of(words)
            run = {"xpid": asked.xpid, "seed": EarlierRun().seed(asked.seed)}
            if checkpoints.existing(newest := asked.folder / CHECKPOINT):
                checkpoint = checkpoints.load_newest(newest).path.read_bytes()
            self.ranks.tell(_RUN, json.dumps(run))
        else:  # a large checkpoint on a slow disk takes rank 0 longer than SILENT_S
            run = json.loads(self.ranks.told(_RUN, lambda: time.sleep(_LOOK_S)))
        checkpoint = self.ranks.broadcast(checkpoint)
        same = [*words, "--xpid", run["xpid"], "--seed", str(run["seed"])]
        if self.leads:
            yield same
            return
        with tempfile.TemporaryDirectory(prefix=f"torchbeast-rank{self.rank}-") as folder:
            if checkpoint:
                (Path(folder) / run["xpid"]).mkdir()
                (Path(folder) / run["xpid"] / CHECKPOINT).write_bytes(checkpoint)
            yield [*same, "--savedir", folder]

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Raises UsageError, in every rank, unless all have the same settings as rank 0.

        settings: every flag by its name.
        """
        own = {k: v for k, v in settings.items() if k not in _OF_ONE_RANK}
        messages = self.ranks.gather({"settings": json.loads(json.dumps(own, default=str))})
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
        """Raises UsageError for settings with which several learners cannot learn as one."""
        size, batch_size = self.size, rollouts.batch_size
        if batch_size % size:
            raise UsageError(
                f"--batch_size {batch_size} is for all learners together and cannot be split "
                f"evenly among {size}: give a multiple of {size}"
            )
        if replay.replay_size:
            raise UsageError(
                f"--replay_size {replay.replay_size} works with one learner only: remove it, or "
                "start one learner"
            )
        threads = hardware.num_learner_threads
        if threads not in (None, 1):
            raise UsageError(
                f"--num_learner_threads {threads} works with one learner only; each of several has "
                "one thread: remove it"
            )

    def share_of(self, settings: RunSettings) -> RunSettings:
        """Returns the settings of this rank: its part of the batch, and what it writes."""
        config = settings.learner
        batch_size = config.rollouts.batch_size // self.size
        learner = dataclasses.replace(
            config,
            rollouts=dataclasses.replace(config.rollouts, batch_size=batch_size),
            hardware=self._hardware(config.hardware),
        )
        if self.leads:
            return dataclasses.replace(settings, learner=learner)
        return dataclasses.replace(
            settings,
            learner=learner,
            checkpoints=dataclasses.replace(settings.checkpoints, disable_checkpoint=True),
            display=dataclasses.replace(settings.display, suppress_logs=True),
            loggers=(),
            metrics=MetricsConfig(),  # none
            becomes_latest=False,
        )

    def _hardware(self, config: HardwareConfig) -> HardwareConfig:
        """Returns this rank's use of the machine: with "auto" a GPU of its own."""
        device = config.device
        if device == "auto" and not config.disable_cuda and torch.cuda.is_available():
            gpus = torch.cuda.device_count()
            if gpus < self.local_size:
                raise UsageError(
                    f"{self.local_size} learners on this machine need a GPU each, and "
                    f"there are {gpus}: start {gpus} (torchrun --nproc_per_node), or give "
                    "--device cpu, or --device cuda:0 for all"
                )
            device = f"cuda:{self.local_rank}"
        return dataclasses.replace(config, device=device, num_learner_threads=1)

    def add_where(self, device: torch.device) -> None:
        """Adds gradients on the GPUs if every rank has one of its own, else on the CPU: nccl
        refuses two ranks of one GPU. device: of this rank's network.
        """
        messages = self.ranks.gather({"host": socket.gethostname(), "device": str(device)})
        places = {(message["host"], message["device"]) for message in messages}
        on_gpus = all(where.startswith("cuda") for _, where in places)
        is_own = on_gpus and len(places) == len(messages)
        self.ranks.device = device if is_own else torch.device("cpu")

    def equalise(self, step: OptimiserStep[Any]) -> None:
        """Gives the learner the state of rank 0's, and chooses where gradients are added."""
        self.add_where(next(step.algo.actor.parameters()).device)
        state = self.ranks.broadcast(saved(step) if self.leads else b"")
        if not self.leads:
            load(step, state)

    def seed(self, root: int) -> int:
        """Returns this rank's seed of what has this seed in a learner alone; rank 0 keeps it."""
        return root if self.leads else seed_of(root, "rank", self.rank)

    def joint(self, source: Source, step: OptimiserStep[Any]) -> RankedLearner:
        """Returns the source of this rank's batches, each once all ranks have one, with the updates
        from them.
        """
        return RankedLearner(source, self.ranks.gather, self.rank, step)


@contextmanager
def replica(launch: Launch) -> Iterator[Replica]:
    """Meets the other ranks; how the block ends is told to those that still wait for this one.

    Ranks other than 0 show warnings alone, and errors with their rank.
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
    """Names the rank in front of its error, and shows nothing else of it but warnings."""
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield
        except (UsageError, RunError) as error:
            error.args = (f"rank {rank}: {error}",)  # the same error: some have other parts too
            raise


def _reason(error: BaseException) -> str:
    """Returns why a rank ends, for the others; "" if it only follows another one.

    An error that none of our sentences explains is told with its traceback: this rank's log ends
    with it.
    """
    cause = error.__cause__ or error
    if isinstance(cause, RankGone):
        return ""
    if isinstance(cause, (UsageError, RunError, NonFiniteError)):
        return str(error)
    if isinstance(cause, Exception):
        return "".join(traceback.format_exception(cause)).strip()
    return str(error) or type(error).__name__
