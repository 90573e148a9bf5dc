# SPDX-License-Identifier: Apache-2.0
"""The run of a learner: resume, train, display, write checkpoints, print a summary.

All learner programs use it, and so does a Learner. They differ in the plan.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchbeast.collect.config import RolloutConfig, usual_batch_size
from torchbeast.collect.contract import Source
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import describe_agent
from torchbeast.core.algos.config import SHAPES, IMPALAConfig, recorded, schedules_of
from torchbeast.core.algos.registry import DEFAULT
from torchbeast.core.update.optimiser_step import RATE, NonFiniteError
from torchbeast.envs.env_process import EnvProcess, Outcome, outcome_in, outcome_of
from torchbeast.errors import UsageError
from torchbeast.fleets.supervisor import RunEnded
from torchbeast.fleets.system import check_buffers, free_memory, keep_freed_memory
from torchbeast.fleets.waiting import say
from torchbeast.reporting.display import next_commands, summary
from torchbeast.reporting.loggers import LoggedRun, Logs
from torchbeast.reporting.prometheus import PrometheusEndpoint
from torchbeast.reporting.run_folder import Session
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.assemble import Assembled, Compute, LearnerConfig, assemble
from torchbeast.run.callbacks import Callbacks, ProgramLearner
from torchbeast.run.checkpoint_writer import CheckpointWriter, PastVersions
from torchbeast.run.config import SERVED_KWARGS, changes, hint_of_settings, naming_flags
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.episodes import TaskScores
from torchbeast.run.plan import Plan
from torchbeast.run.training import DONE, Consumer, PeriodicCheckpoints, Rows, Training
from torchbeast.run.watch import RunDisplay, start_watchdog

if TYPE_CHECKING:  # only programs with a replay or with several learners import them
    from torchbeast.core.storages.replay.store import RolloutStore
    from torchbeast.run.replicas import Replica

_log = logging.getLogger("torchbeast.learner")

_JOIN_S = 15.0
_VERSIONS = 50  # of the agent for self-play, in a whole run


class LearnerRun:
    """A run of a learner. Only one thread uses it: the main thread, or the caller's.

    Attributes:
        plan: The plan of the run, or of this learner's share of it.
        session: Its supervisor and its folder.
        earlier: The run that it resumes.
        made: The learner.
        progress: Steps and episodes of the run.
    """

    def __init__(
        self,
        plan: Plan,
        session: Session,
        resumed: Path | None = None,
        replica: Replica | None = None,
    ) -> None:
        """Assembles the learner, with state and progress of the earlier run, if there is one.

        resumed: the checkpoint to resume, by default the newest one in the run's folder. replica:
        this process among several learners, which divide the batch; None: it is the only learner.

        Raises UsageError if the earlier run does not fit the plan.
        """
        self._replica, self.session = replica, session
        self._saved_replay: RolloutStore | None = None
        self._batch_size = plan.learner.online_batch_size  # of all learners
        self._total_steps = plan.learner.total_steps
        newest = session.folder.checkpoint
        self._is_saved = resumed in (None, newest)  # the state until the first update
        self.earlier = _earlier_run(newest, None if self._is_saved else resumed)
        plan = replace(plan, learner=plan.learner.after(self.earlier.recorded))
        self.plan = plan if replica is None else replica.share_of(plan)
        seed = self.earlier.seed(plan.run.seed)
        # A program or Learner keeps the settings that only another one has.
        left_out = (SERVED_KWARGS, *plan.of_command)
        others = {k: v for k, v in self.earlier.recorded.items() if k not in left_out}
        self._recorded = {**others, **plan.record(), "seed": seed}
        self._changed = changes(self.earlier.recorded, self._recorded, plan.of_command)
        self.progress = self.earlier.progress()
        scores, num_envs = TaskScores(plan.env), plan.collection.num_envs
        names = scores.names if len(scores.names) > 1 else ()
        if 0 < num_envs < len(names) and not plan.others_serve:
            raise UsageError(
                f"num_envs {num_envs} is less than the {len(names)} tasks of env: use at least one "
                "environment for each"
            )
        self.progress.keep_last(plan.display.episodes_for_avg, names)
        self.progress.score = scores
        torch.manual_seed(seed)
        self.made = self._assembled()
        schedules = self._restart_schedules()
        if replica is not None:
            replica.equalise(self.made)
        is_other_run = self.earlier.recorded.get("seed", seed) != seed
        if is_other_run or not (replica is None or replica.leads):
            # Not the numbers of rank 0, or of the run that the checkpoint was copied from.
            torch.manual_seed(self._environment_seed)
        self._say_what_it_resumes(schedules)

    def train(self) -> None:
        """Trains until the run ends, for any reason, and prints a summary."""
        keep_freed_memory(self.made.compute.device.type)
        run, step = self.plan.run, self.progress.step
        if step >= (run.pause_at or math.inf):
            say(f"Run {run.xpid} has already reached --pause_at. Remove it to continue.")
            return
        callbacks = Callbacks(self.plan.callbacks)
        if step >= self._total_steps and not callbacks.are_due(self.earlier, step):
            say(
                f"Run {run.xpid} is already complete ({step:,}/{self._total_steps:,} steps). "
                "Increase --total_steps to continue."
            )
            self.session.supervisor.stop(DONE)  # so that hosts that dial in may end
            return
        learner = ProgramLearner(self._env_process, self._total_steps, callbacks)
        with closing(learner), ExitStack() as ending:
            self.begin()
            self._learn(self.training(callbacks.entries, ending), learner)

    def _env_process(self, num_envs: int) -> EnvProcess:
        """Makes environments in a process of their own; raises UsageError or RunError."""
        return EnvProcess(self.plan.local_env(), num_envs, check_goes_on=self._check_may_play)

    def _check_may_play(self) -> None:
        """Raises RunError if the run has failed, or if a signal has asked for its end; at any other
        end callbacks may still play.
        """
        supervisor = self.session.supervisor
        if supervisor.failure is not None or supervisor.has_signal:
            raise RunEnded("the run has ended")

    def check_fits(self, earlier: EarlierRun) -> None:
        """Raises UsageError unless this run could resume the earlier one."""
        self._check_same(earlier)
        earlier.check_same_model(self.made.agent.spec)
        earlier.check_fits(self.made.agent)

    def _check_same(self, earlier: EarlierRun) -> None:
        earlier.check_same_environment(self.plan.env.name, self.plan.others_serve)
        earlier.check_same_algorithm(self._recorded["algo"])

    def _assembled(self) -> Assembled:
        """Assembles the learner, with the state of the earlier run."""
        plan, earlier = self.plan, self.earlier
        self._check_same(earlier)
        check_learns_from_replay(plan.learner, self._recorded["algo"])
        ranks = None if self._replica is None else self._replica.ranks
        makers = plan.make_agent, plan.collection.weights
        return assemble(plan.learner, *makers, earlier, self._say_start, ranks)

    def _say_what_it_resumes(self, schedules: Mapping[str, str]) -> None:
        """Prints where a resumed run continues, and its changes; schedules: lines by setting."""
        if self.earlier.recorded:
            say(f"Resuming {self.session.folder.path} at step {self.progress.step:,}.")
            for name, (before, now) in self._changed.items():
                if name not in schedules:
                    say(f"{name} {now} (previously {before})")
        for line in schedules.values():
            say(line)

    def _restart_schedules(self) -> dict[str, str]:
        """Begins the schedules that the user has changed at this step; returns lines about what
        changes or has changed, by setting.
        """
        step, total = self.made.optimiser_step, self._total_steps
        starts, now = step.counters.schedule_starts, step.counters.env_steps
        if now >= total:
            return {}
        before, was = self.earlier.recorded, {}
        for name, schedule in schedules_of(before).items():
            is_changed = not self._changed.keys().isdisjoint((name, f"{name}_schedule"))
            if is_changed and name in step.schedules.of and self.plan.run.restart_schedules:
                end, start = before.get("total_steps", total), starts.get(name, 0)
                is_known = schedule.shape in SHAPES  # otherwise a function, perhaps of a notebook
                was[name] = f" (was {schedule.at(now, end, start):.3g})" if is_known else ""
        step.restart_schedules(was)
        lines = {}
        for name, schedule in step.schedules.of.items():
            if schedule.changes or name in (RATE, *was):
                value = schedule.at(now, total, starts.get(name, 0))
                since = f" from step {now:,} on{was[name]}" if name in was else ""
                lines[name] = f"{name} {value:.3g}{since}, {schedule.ending(total)}"
        return lines

    def begin(self) -> None:
        """Records the part of the run that begins now; call it once there is something to train."""
        self.session.folder.begin(self._recorded, self.progress.step, self._changed)

    def _source(self, ending: ExitStack) -> Source:
        """Makes the source that the plan describes, with a replay or gradient workers if the run
        has them; `ending` ends them.
        """
        plan, made, seed = self.plan, self.made, self._environment_seed
        if plan.gradients is not None:
            return plan.gradients(plan, made, seed, ending)
        keywords = plan.env.options.info_keywords
        learner = made.learner_info(plan.learner, keywords, seed, first_step=self.progress.step)
        if not plan.collection.plays_ahead:
            learner = replace(learner, batches_at_once=1)
        free = free_memory()  # before the source allocates some
        source = plan.collection.source(learner, plan.env, ending)
        check_buffers(source.num_bytes, free)
        if not plan.learner.replay.is_used:
            return source
        from torchbeast.run.replay import with_replay

        run = self.session, bool(self.earlier.recorded), self._outcome, plan.join_replay
        source, self._saved_replay = with_replay(plan.learner, source, learner, free, *run, ending)
        return source

    def _outcome(self) -> Outcome:
        """Returns the function that computes rewards of other goals in the run's environment;
        raises UsageError if the environment does not have goals.
        """
        plan = self.plan
        if plan.make_envs is None:
            return outcome_of(plan.local_env(), self.session.supervisor)
        with closing(plan.make_envs(1)) as env:
            return outcome_in(env, plan.env.name)

    @property
    def _environment_seed(self) -> int:
        """A seed for environments and replay that is new for each part of the run."""
        root = np.random.SeedSequence((self._recorded["seed"], self.progress.step))
        seed = int(root.generate_state(1)[0])
        return seed if self._replica is None else self._replica.seed(seed)

    def _learn(self, training: Training, learner: ProgramLearner) -> None:
        supervisor = self.session.supervisor
        with PrometheusEndpoint().served(self.plan.metrics) as endpoint:
            try:
                learner.begin(self.earlier, training)
            except BaseException:
                learner.end()  # of the callbacks that have started
                raise
            if self.progress.step >= self._total_steps:  # only the last evaluation was left
                learner.end()
                training.save()
                supervisor.stop(DONE)  # so that hosts that dial in may end
                return
            self.start(training)
            training.start(self.made.compute.learner_threads, learner.step)
            try:
                RunDisplay(plan=self.plan, training=training, prometheus=endpoint).until_the_end()
            except Exception as error:  # before `stop`: the first of both counts
                supervisor.fail("", error)
                raise
            finally:
                supervisor.stop("the program ended")
                self.end(training, learner.end)
            if training.rows.count or supervisor.failure is None:
                self._say_end(training)

    def training(
        self,
        also_saved: Callable[[], Mapping[str, Any]],
        ending: ExitStack,
        own: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - stateless
    ) -> Training:
        """Makes the source, opens the logs, and makes the loop of the run with its consumers.

        also_saved: called for every checkpoint; returns further entries. ending: ends source and
        logs. own: see Training.
        """
        made, plan, folder, step = self.made, self.plan, self.session.folder, self.progress.step
        labels = checkpoints.labels(made.agent, self._recorded)
        stops_at = {DONE: self._total_steps}
        if (pause_at := plan.run.pause_at) is not None:
            stops_at[f"--pause_at {pause_at:,}"] = pause_at
        trace = plan.learner.hardware.write_profiler_trace
        run = LoggedRun(folder=folder.path, settings=self._recorded, step=step)
        loggers = () if step >= self._total_steps else plan.loggers  # none if it is complete
        source = self._source(ending)
        log = ending.enter_context(closing(Logs(loggers, run)))
        if self._replica is not None:
            from torchbeast.run.replicas import RankedLearner

            source = RankedLearner(source, self._replica, made.optimiser_step)
        if plan.gradients is not None or self._replica is not None:
            joint: Any = source  # a JointLearner, which updates too
            made = replace(made, optimiser_step=joint)
        training = Training(
            source=source,
            made=made,
            supervisor=self.session.supervisor,
            rows=Rows(source, log, self.progress, plan.env.options.info_keywords),
            writer=CheckpointWriter(
                folder, labels, plan.checkpoints, self._saved_replay, also_saved
            ),
            stops_at=stops_at,
            learns_all=self._replica is not None,
            own=own,
            trace=folder.path / "trace.json" if trace else None,
        )
        training.consumers = [*self._consumers(training)]
        return training

    def _consumers(self, training: Training) -> Iterator[Consumer]:
        """Yields what gets each row after the log."""
        folder, interval_s = self.session.folder, self.plan.checkpoints.checkpoint_interval
        if self.plan.becomes_latest:
            yield lambda step, row: folder.become_latest() if training.rows.count == 1 else None
        leads = self._replica is None or self._replica.leads
        if leads and (pool := self.plan.env.options.selfplay):
            every = max(1, self._total_steps // _VERSIONS)
            fetch = training.made.optimiser_step.state_dict  # gets what only workers may have
            yield PastVersions(Path(pool), self.made.agent, every, self.progress.step, fetch)
        yield PeriodicCheckpoints(training, interval_s)

    def start(self, training: Training) -> None:
        """Starts collecting and, in the only or leading learner, the watchdog, which knows what
        keeps other ranks waiting too.
        """
        training.source.start(self.session.supervisor)
        if self._replica is None or self._replica.leads:
            start_watchdog(training, self._batch_size)

    def end(self, training: Training, end_callbacks: Callable[[], object]) -> None:
        """Waits for the threads of a run that has ended, calls `end_callbacks`, then saves, unless
        nothing has changed or after a NaN.

        Updates before a NaN may already have damaged the weights. So the last checkpoint is kept,
        and the state before the NaN is in last_good.tar.
        """
        supervisor = self.session.supervisor
        with ExitStack() as last:  # in reverse order, also if Ctrl-C interrupts one of them
            last.callback(self._save_at_end, training)
            last.callback(self._end_callbacks, end_callbacks)
            if self._replica is not None and not self._replica.leads:
                # Its learner threads wait for rank 0, which may evaluate for long.
                while any(name.startswith("learner") for name in supervisor.join(1.0)):
                    if supervisor.failure is not None or supervisor.has_signal:
                        break
            if running := supervisor.join(_JOIN_S):
                _log.warning(
                    f"threads that did not end within {_JOIN_S:g} s: {running}; the final "
                    f"checkpoint waits at most {training.patience_s:.0f} s for the current update"
                )

    def _end_callbacks(self, end: Callable[[], object]) -> None:
        running = self.session.supervisor.join(0.0)
        if not any(name.startswith("learner") for name in running):  # which call callbacks
            end()

    def _save_at_end(self, training: Training) -> None:
        if self._is_saved and not training.rows.count:
            return
        failure = self.session.supervisor.failure
        if failure is None or not isinstance(failure.error, NonFiniteError):
            try:
                training.save()
            except Exception as error:
                self.session.supervisor.fail_at_end("", error)

    def _say_start(self, compute: Compute, agent: Agent) -> None:
        say(describe_agent(agent))
        say(compute.summary(agent.model))
        if clipping := getattr(self.plan.learner.algorithm, "reward_clipping", None):
            say(f"Rewards: {'unclipped' if clipping == 'none' else 'clipped to [-1, 1]'}")
        if hint := self._hint():
            say(hint)

    def _hint(self) -> str:
        """Returns a message about the settings of a program's new run without a preset, or ""."""
        chosen = self.plan.recorded
        if self.earlier.recorded or chosen.get("preset", "") is not None:
            return ""
        usual = {"algo": DEFAULT} | recorded(IMPALAConfig()) | recorded(RolloutConfig())
        usual["batch_size"] = usual_batch_size(self.plan.collection.num_envs)
        return hint_of_settings(self.plan.env.name, chosen["algo"], usual.items() <= chosen.items())

    def _say_end(self, training: Training) -> None:
        plan, folder, replica = self.plan, self.session.folder, self._replica
        say(summary(self.progress, training.rows.steps_here, training.rows.seconds))
        naming = naming_flags(self._recorded)
        plays_here = plan.callbacks or plan.learner.transitions.hindsight_share
        is_named = plays_here or not plan.others_serve  # see Plan.local_env
        own = dict(plan.asked.kwargs) if plan.others_serve else {}  # typed; no run records them
        words = ["--env", plan.env.name, "--env_kwargs", json.dumps(own)] if own else naming
        to_resume = [*(words if is_named else []), *plan.repeated]
        if self.progress.step >= self._total_steps:
            to_resume += ["--total_steps", str(2 * self._total_steps)]
        exists = folder.checkpoint.exists()
        here = replica.size if replica is not None and replica.on_one_machine else 1
        say(next_commands(plan.program, folder.path, exists, naming, to_resume, here))


def _earlier_run(newest: Path, resumed: Path | None) -> EarlierRun:
    """Reads exactly the checkpoint to resume, from whichever run, or the newest of a folder."""
    if resumed is not None:
        return EarlierRun(checkpoints.FoundCheckpoint(checkpoints.load(resumed), resumed))
    earlier = EarlierRun.newest(newest)
    earlier.go_on(newest)
    return earlier


def check_learns_from_replay(config: LearnerConfig, algo: str) -> None:
    """Raises UsageError for a replay if the algorithm would mistake replayed data for new data, or
    its burn-in cannot work.

    algo: name of the algorithm.
    """
    if config.learns_from_transitions:
        return
    if config.algo.burns_in:
        _check_burn_in(config, algo)
    if config.replay.is_used and not config.algo.learns_from_replay:
        raise UsageError(
            f"algo {algo} does not use a replay: remove replay_size and replay_ratio, or use laser "
            "or r2d2 (in another run if this one was already trained)"
        )
    if config.algo.learns_from_replay and not config.replay.is_used:
        off = "replay_ratio" if config.replay.replay_size else "replay_size"
        say(f"Replay is off. Set {off} to use it.")


def _check_burn_in(config: LearnerConfig, algo: str) -> None:
    length, burn_in = config.rollouts.unroll_length, config.algorithm.burn_in
    if burn_in >= length:
        raise UsageError(
            f"burn_in {burn_in} leaves no step of a rollout to train on: use less than "
            f"unroll_length {length}"
        )
    if config.replay.replay_service is not None:
        raise UsageError(
            f"algo {algo} cannot share a replay, because the recurrent states in it would come "
            "from other agents' networks: remove replay_service, or shared_replay of a sweep"
        )
