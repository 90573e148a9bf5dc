# SPDX-License-Identifier: Apache-2.0
"""A learner's run once its source can be made: resume, learn while showing it, checkpoint, sum up.

Every learner program uses this; what differs between them is how the source is made.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import nn

from torchbeast.cli.command_line import flatten
from torchbeast.cli.flags import LearnerGroups, PolyBeastLearnerFlags, available_cores
from torchbeast.cli.resuming import changes
from torchbeast.core.actors.agent import Agent
from torchbeast.core.actors.contract import Mode, specs_of_extras
from torchbeast.core.algos.base import NonFiniteError
from torchbeast.core.algos.impala import Impala, ImpalaConfig
from torchbeast.core.losses import RewardClipping
from torchbeast.core.nest_py import flatten as flatten_nest
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning import network_cost
from torchbeast.learning.hardware import choose, share_cores
from torchbeast.learning.reward_clipping import sentence
from torchbeast.learning.session import Session
from torchbeast.learning.training import Progress, Source, Training, TrainingParts
from torchbeast.learning.weights import Publisher
from torchbeast.processes.malloc import keep_freed_memory
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.diagnosis import (
    UNKNOWN,
    Away,
    Diagnosis,
    Shares,
    Window,
    alive,
    diagnose,
    lost_streams,
    setup_of,
)
from torchbeast.reporting.display import Display, Shown
from torchbeast.reporting.log_files import LogFiles
from torchbeast.reporting.summary import next_commands, summary
from torchbeast.reporting.watchdog import Watchdog

_log = logging.getLogger("torchbeast.learner")

_SHOW_EVERY_S = 1.0
_JOIN_S = 15.0

Adviser = Callable[[Shares], Diagnosis | None]
Weights = TypeVar("Weights", bound=Publisher)


class CheckpointNotWritten(RunError):
    """What was learnt since the checkpoint before may be lost."""


class StartableSource(Source, Protocol):
    """A source that has threads of its own."""

    def start(self, supervisor: Supervisor) -> None:
        """Begins to collect, in threads of the supervisor."""


@dataclass(frozen=True, kw_only=True)
class Learner(Generic[Weights]):
    """What a source is made for."""

    agent: Agent
    weights: Weights
    device: torch.device
    extras: tuple[str, ...]  # of acting, that the algorithm needs
    mode: Mode  # of acting
    seed: int  # of the environments; another one after each resumption


def learner_threads(count: int | None, device: torch.device) -> int:
    """How many, when the flags leave it open: two hide a GPU's transfers."""
    return count or (2 if device.type == "cuda" else 1)


def inference_threads(count: int | None, device: torch.device) -> int:
    """How many, when the flags leave it open. On the CPU to act is at most a quarter of a step,
    and more threads than it takes make smaller batches; each has the threads of an operation.
    """
    if count is not None:
        return count
    on_cpu = max(1, available_cores() // (4 * torch.get_num_threads()))
    return 2 if device.type == "cuda" else on_cpu


class LearnerRun:
    """One run of one learner program, used by its main thread."""

    def __init__(
        self,
        program: str,
        flags: LearnerGroups,
        env: EnvSpec,
        session: Session,
        observation_keys: Sequence[str] = (),
    ) -> None:
        """`flags`: with `reward_clipping.resolved`. `env`: what is really played;
        `observation_keys`: what is seen of it; both as the servers say.
        """
        self._program = program
        self._flags = flags
        self._session = session
        self._saved = self._load()
        made = env.options.as_json() | {"observation_keys": list(observation_keys)}
        played = {"env": env.name, "env_kwargs": dict(env.kwargs), **made}
        self._recorded = {**flatten(flags), **played, "seed": self._seed()}
        self._labels = {"format": checkpoints.FORMAT, "flags": self._recorded}
        session.folder.update(args=self._recorded)
        torch.manual_seed(self._recorded["seed"])

    def train(
        self,
        make_agent: Callable[[str, bool], Agent],
        make_weights: Callable[[nn.Module, int], Weights],
        make_source: Callable[[Learner[Weights]], StartableSource],
    ) -> None:
        """Learns until the end, whatever ends it, and says what came of it.

        make_agent: called with the name of the model, and whether it reads values.
        """
        compute = choose(self._flags)
        print(compute, flush=True)
        print(sentence(self._flags.learning.reward_clipping), flush=True)
        if compute.device.type == "cpu":
            keep_freed_memory()
        torch.set_num_threads(compute.threads)  # the start of the weights depends on it too
        reads_values = self._saved is None or checkpoints.reads_values(self._saved)
        agent, device = make_agent(self._model_name(), reads_values), compute.device
        self._check_same_model(agent.model_name)
        agent.model.reward_input = self._reward_input()
        self._labels |= {
            "model": agent.model_name,
            "reward_input": agent.model.reward_input,
            "reads_values": agent.reads_values,
        }
        agent.model.to(device)
        agent.model.compute_dtype = compute.dtype
        say_costs(agent)
        if self._flags.machine.compile:
            agent.model.compile()  # copies of it, which act, stay as they are
        _check_extras(agent, Impala.needs)
        config = dataclasses.replace(
            impala_config(self._flags),
            bytes_at_once=compute.bytes_at_once,
            num_threads=share_cores(compute, self._flags, agent),
        )
        algo = Impala(agent.model, agent.model.distribution, config)
        progress = self._resume(algo)
        if progress.step >= self._flags.learning.total_steps:
            self._say_complete(progress)
            return
        weights = make_weights(agent.model, algo.version)
        seed = _environment_seed(self._recorded["seed"], progress.step)
        learner = Learner(
            agent=agent,
            weights=weights,
            device=device,
            extras=algo.needs,
            mode=algo.mode,
            seed=seed,
        )
        source = make_source(learner)
        with closing(LogFiles(self._session.folder.path, progress.step)) as log_files:
            parts = TrainingParts(
                source=source,
                algo=algo,
                model=agent.model,
                weights=weights,
                device=device,
                log_files=log_files,
                supervisor=self._session.supervisor,
            )
            threads = learner_threads(self._flags.machine.num_learner_threads, device)
            advise = self._adviser(agent, device)
            self._learn(self._training(parts, progress), source, threads, advise)

    def _training(self, parts: TrainingParts, progress: Progress) -> Training:
        trace = self._flags.machine.write_profiler_trace
        return Training(
            parts,
            self._flags.learning.total_steps,
            progress,
            trace=self._session.folder.path / "trace.json" if trace else None,
            keep=None if self._flags.run.disable_checkpoint else self._keep_last_good,
        )

    def _adviser(self, agent: Agent, device: torch.device) -> Adviser:
        """What limits this run, by its time shares."""
        size = sum(parameter.numel() for parameter in agent.model.parameters())
        setup = setup_of(self._program, self._flags, device.type == "cuda", size)
        return functools.partial(diagnose, setup=setup)

    def _learn(
        self, training: Training, source: StartableSource, num_threads: int, advise: Adviser
    ) -> None:
        began, first_step = time.monotonic(), training.progress.step
        source.start(self._session.supervisor)
        training.start(num_threads)
        try:
            self._watch(training, source, advise)
        except Exception as error:  # before the stop, which would make it an end in good order
            self._session.supervisor.fail("", error)
            raise
        finally:
            self._session.supervisor.stop("the program ended")
            self._end(training)
        self._say(training.progress, first_step, time.monotonic() - began)

    def _watch(self, training: Training, source: Source, advise: Adviser) -> None:
        """The main thread's part: show, save now and then, notice that nothing moves."""
        supervisor, interval = self._session.supervisor, self._flags.run.checkpoint_interval
        watchdog = Watchdog(time.monotonic(), self._flags.learning.batch_size)
        window, saved_at = Window(), time.monotonic()
        with Display(f"{self._recorded['env']}, {self._flags.run.xpid}") as display:
            while not supervisor.wait(_SHOW_EVERY_S):
                status, now = source.status(), time.monotonic()
                shares = window.add(training.reading()) if training.updates_here else UNKNOWN
                away = source.away()
                diagnosis = lost_streams(away, alive(status)[1]) or advise(shares)
                display.show(self._shown(training.progress, status, away, shares, diagnosis))
                if stall := watchdog.check(training.updates, status, now, source.hanging()):
                    display.warn(stall)
                if now - saved_at >= interval:
                    self._save_if_possible(training, display)
                    saved_at = time.monotonic()

    def _save_if_possible(self, training: Training, display: Display) -> None:
        """A full disk may have room again at the next time; the run need not end for it."""
        try:
            self._save(training)
        except CheckpointNotWritten as error:
            display.warn(f"{error}; the run goes on")

    def _shown(
        self,
        progress: Progress,
        status: dict[str, int],
        away: Sequence[Away],
        shares: Shares,
        diagnosis: Diagnosis | None,
    ) -> Shown:
        return Shown(
            step=progress.step,
            total_steps=self._flags.learning.total_steps,
            episodes=progress.episodes,
            mean_return=progress.mean_return(),
            loss=progress.loss,
            mean_length=progress.mean_length(),
            lag=(progress.mean_lag, progress.max_lag),
            learner_queue_size=status["learner_queue_size"],
            collectors=alive(status),
            away=away,
            collected=status.get("collected_steps", 0),
            shares=shares,
            diagnosis=diagnosis,
        )

    def _end(self, training: Training) -> None:
        """Waits for the threads, then saves: always, but after a NaN, which may have been prepared
        by weights as bad as itself. The checkpoint before it is kept, and the state before it is
        in last_good.tar."""
        running = self._session.supervisor.join(_JOIN_S)
        if running:
            _log.warning("threads that did not end within %g s: %s", _JOIN_S, running)
        failure = self._session.supervisor.failure
        if failure is None or not isinstance(failure.error, NonFiniteError):
            try:
                self._save(training)
            except RunError as error:
                self._session.supervisor.fail_at_end("", error)

    def _save(self, training: Training) -> None:
        if self._flags.run.disable_checkpoint:
            return
        path = self._session.folder.checkpoint
        try:
            checkpoints.save(path, training.checkpoint(self._labels))
        except OSError as error:
            raise CheckpointNotWritten(
                f"no checkpoint was written to {path} ({error.strerror or error}), the one before "
                "it, if there was one, is as it was: make room there"
            ) from error

    def _keep_last_good(self, state: dict[str, Any]) -> Path:
        path = self._session.folder.path / "last_good.tar"
        checkpoints.save(path, {**state, **self._labels})
        return path

    def _load(self) -> dict[str, Any] | None:
        """The checkpoint of an earlier run of this name."""
        path = self._session.folder.checkpoint
        return checkpoints.load(path) if path.exists() else None

    def _seed(self) -> int:
        """The flag, else that of the run that is resumed, else a random one."""
        if self._flags.run.seed is not None:
            return self._flags.run.seed
        saved = self._saved["flags"].get("seed") if self._saved else None
        return secrets.randbits(31) if saved is None else int(saved)

    def _resume(self, algo: Impala) -> Progress:
        progress = Progress()
        if self._saved is None:
            return progress
        self._check_same_environment(self._saved["flags"])
        path = self._session.folder.checkpoint
        checkpoints.resume(algo, self._saved, path)
        progress.load_state_dict(self._saved["stats"])
        print(f"Resuming {path.parent} at step {progress.step:,}.", flush=True)
        for line in changes(self._saved["flags"], self._recorded):
            print(line, flush=True)
        return progress

    def _model_name(self) -> str:
        """The flag's; that of the run that is resumed where the flag leaves it open, or is what it
        was then.
        """
        asked = self._flags.model.model
        if self._saved is None or asked not in ("auto", self._saved["flags"].get("model")):
            return asked
        return checkpoints.model_name(self._saved)

    def _reward_input(self) -> RewardClipping:
        """As rewards are learnt from; in a run that is resumed as its weights know them."""
        if self._saved is not None:
            return checkpoints.reward_input(self._saved)
        return cast(RewardClipping, self._flags.learning.reward_clipping)

    def _check_same_model(self, now: str) -> None:
        """Weights of one network may fit another that computes something else."""
        before = now if self._saved is None else checkpoints.model_name(self._saved)
        if now != before != "auto":
            raise UsageError(
                f"the run {self._flags.run.xpid} learns with --model {before}, not {now}: "
                f"give --model {before}, or another --xpid"
            )

    def _check_same_environment(self, saved: dict[str, Any]) -> None:
        before, now = saved.get("env"), self._recorded["env"]
        if before is not None and before != now:
            alone = isinstance(self._flags, PolyBeastLearnerFlags)
            raise UsageError(
                f"the run {self._flags.run.xpid} learns {before}, not {now}: "
                f"{'start servers of' if alone else 'give --env'} {before}, or give another --xpid"
            )

    def _say_complete(self, progress: Progress) -> None:
        print(
            f"{self._flags.run.xpid} has learnt {progress.step:,} steps already and --total_steps "
            f"is {self._flags.learning.total_steps:,}: nothing is left to do. "
            "Give more --total_steps to go on."
        )

    def _say(self, progress: Progress, first_step: int, seconds: float) -> None:
        folder = self._session.folder
        print(summary(progress, progress.step - first_step, seconds))
        exists = folder.checkpoint.exists()
        complete = progress.step >= self._flags.learning.total_steps
        print(next_commands(self._program, folder.path, exists, complete), flush=True)


def _check_extras(agent: Agent, needs: Sequence[str]) -> None:
    """UsageError when the model does not give what the algorithm needs of acting."""
    try:
        specs_of_extras(agent.model, needs)
    except ValueError as error:
        raise UsageError(str(error)) from error


def say_costs(agent: Agent) -> None:
    """Prints what acting costs in a line, and writes every leaf's part to out.log."""
    if flatten_nest(agent.observation_space):
        found = network_cost.costs(agent.model, agent.observation_space)
        print(network_cost.sentence(found), flush=True)
        _log.info("what the network costs\n%s", network_cost.table(found))


def impala_config(flags: LearnerGroups) -> ImpalaConfig:
    """The algorithm's share of the flags."""
    learning, optimiser = flags.learning, flags.optimiser
    return ImpalaConfig(
        discounting=learning.discounting,
        entropy_cost=learning.entropy_cost,
        baseline_cost=learning.baseline_cost,
        reward_scale=learning.reward_scale,
        reward_clipping=cast(RewardClipping, learning.reward_clipping),  # refuses "auto"
        learning_rate=optimiser.learning_rate,
        alpha=optimiser.alpha,
        momentum=optimiser.momentum,
        epsilon=optimiser.epsilon,
        grad_norm_clipping=optimiser.grad_norm_clipping,
        total_steps=learning.total_steps,
        warmup_steps=optimiser.warmup_steps,
    )


def _environment_seed(seed: int, step: int) -> int:
    """A seed of the environments that no earlier part of the run has used."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])
