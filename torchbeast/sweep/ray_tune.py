# SPDX-License-Identifier: Apache-2.0
"""Runs the agents of a sweep as trials of Ray Tune: the only module that imports Tune.

    TuneRunner --- thread: tune.run ---> trial.py: a Ray actor on some node, one for each agent
        ^                |                    v
        +---- events ----+               agent_main.py: the agent's program
                                              ^ v  columns, if agents share a replay
                                         ray_replay.py: a Ray actor on the sweep's node

Tune decides where and when agents run, and its scheduler which of them end early. The figures that
the sweep shows are read from the agents' files, as those of agents on this machine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torchbeast.cli.command_line import parse
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.schemes.config import RayConfig
from torchbeast.schemes.ray_fleet import RayFleet, User
from torchbeast.schemes.ray_replay import serving_on_ray
from torchbeast.schemes.room import Node, Room
from torchbeast.sources.sharing.service import Served
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.following import has_ended_well
from torchbeast.sweep.settings import FLAGS, Agent
from torchbeast.sweep.table import Row
from torchbeast.sweep.trial import ENDED, HELD, RETURN, STEP, WHY, Requests, Trial

_EVERY_S = 1.0
_FILES = ".ray-tune"  # Tune's own, in the sweep's folder; of no use once it has ended
_FACTOR, _RUNGS = 3, 3  # asha: a third goes on at 1/27, 1/9 and 1/3 of the steps
# Read by Tune. Agents write logs of their own, begin without a return, and have a working folder;
# the sweep shows what they do.
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}

_ADDRESS = "RAY_ADDRESS"
_SWEEP = User(
    "sweep",
    "Its agents write checkpoints where Ray lets them; the same --name continues it.",
    # When Ray ends a trial, it does not kill the agent, which notices and writes its checkpoint.
    {"RAY_kill_child_processes_on_worker_exit": "false"},
)

Event = Callable[[], None]


@contextmanager
def on_ray(
    config: SweepConfig, agents: Sequence[Agent], shared_replay: bool
) -> Iterator[tuple[TuneRunner, Served | None]]:
    """Joins the cluster, or starts Ray here; ends it, or leaves it as it was.

    Yields what runs agents, and the replay that they share, if they do.

    Raises RunError without Ray, Tune or cluster, and UsageError where no agent has room.
    """
    name, ray = agents[0].folder.parent.name, RayConfig(address=config.address)
    with RayFleet(ray, f"sweep {name}", _is_own_code(agents), _SWEEP) as fleet:
        tune = _import_tune()
        check_room(config, fleet.room())
        if not shared_replay:
            yield TuneRunner(tune, config, str(fleet)), None
            return
        at_once = agents_at_once(config, fleet.room(), len(agents))
        if at_once < len(agents):
            print(
                f"{at_once} of {len(agents)} agents begin now: the others join the shared "
                "replay later."
            )
        # On this node, whose end is that of the sweep anyway.
        with serving_on_ray(replay_name(name), num_cpus=0.0, node=fleet.own_node) as served:
            joining = Joining([f"--replay_service={served.address}"], {_ADDRESS: fleet.cluster})
            yield TuneRunner(tune, config, str(fleet), joining), served


def agents_at_once(config: SweepConfig, room: Room, agents: int) -> int:
    """Returns how many agents Ray has room for now, of those that --parallel lets begin: free CPUs,
    and nodes with what each needs.
    """
    free = math.floor(room.free_cpus / config.agent_cpus + 1e-9)
    fitting = sum(_fitting(config, node) for node in room.nodes)
    return min(agents, config.parallel or agents, free, fitting)


def _fitting(config: SweepConfig, node: Node) -> int:
    """Returns the number of agents that one node has room for if it is used by nobody else."""
    shares = [node.cpus / config.agent_cpus]
    if config.agent_gpus:
        shares.append(node.gpus / config.agent_gpus)
    return math.floor(min(shares) + 1e-9)


def replay_name(sweep: str) -> str:
    """Returns a new name of a shared replay: other sweeps of this name may be on the cluster."""
    return f"sweep-{re.sub(r'[^A-Za-z0-9_.-]', '_', sweep)}-{secrets.token_hex(4)}"


class Joining(NamedTuple):
    """What lets agents join a shared replay: flags, and variables of their environment."""

    words: Sequence[str] = ()
    environment: Mapping[str, str] = MappingProxyType({})


NO_REPLAY = Joining()


def _import_tune() -> Any:
    os.environ.update(_ENVIRONMENT)
    try:
        from ray import tune
    except ImportError as error:
        raise RunError(
            f"Ray Tune is not installed ({error.__cause__ or error}): "
            "pip install 'torchbeast[tune]'. --on local works without it"
        ) from error
    for quiet in ("ray.tune", "ray.train"):  # the sweep says what happens
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    return tune


def _is_own_code(agents: Sequence[Agent]) -> bool:
    """Whether nodes must import a module of the user's."""
    all_flags: list[Any] = [
        parse(FLAGS[agent.program], agent.program, agent.words) for agent in agents
    ]
    return any(
        ":" in name
        for flags in all_flags
        for name in (flags.environment.spec.name, flags.model.spec.name)
    )


def check_room(config: SweepConfig, room: Room) -> None:
    """Raises UsageError if no node has what an agent needs."""
    cpus, gpus = config.agent_cpus, config.agent_gpus
    if not any(node.cpus >= cpus and node.gpus >= gpus for node in room.nodes):
        raise UsageError(
            f"no node has room for an agent with --agent_cpus {cpus:g} and --agent_gpus {gpus:g}: "
            f"there are {room}. Give fewer, or add a larger node to the cluster"
        )


class TuneRunner:
    """Runs agents on a Ray cluster. Used by the main thread."""

    def __init__(
        self, tune: Any, config: SweepConfig, where: str, joining: Joining = NO_REPLAY
    ) -> None:
        """Prepares running them with the module ray.tune; where: the cluster, in words."""
        self._tune, self._config, self._where, self._joining = tune, config, where, joining
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._error: Exception | None = None

    def __str__(self) -> str:
        gpus = f" and {self._config.agent_gpus:g} GPUs" if self._config.agent_gpus else ""
        return f"with {self._config.agent_cpus:g} CPUs{gpus} each, by {self._where}"

    def run(self, rows: Sequence[Row], supervisor: Supervisor, show: Callable[[], None]) -> None:
        """Runs all agents that wait, until they or the sweep have ended; calls `show` often."""
        waiting = {row.agent.name: row for row in rows if row.state == "waiting"}
        folder = next(iter(waiting.values())).agent.folder.parent
        requests = Requests(folder)
        requests.create()
        try:
            self._run(_Trials(waiting, requests, self._events), folder, supervisor, show)
        finally:
            requests.remove()
            shutil.rmtree(folder / _FILES, ignore_errors=True)
        if self._error is not None:
            supervisor.fail("Ray Tune", self._error)

    def _run(
        self, trials: _Trials, folder: Path, supervisor: Supervisor, show: Callable[[], None]
    ) -> None:
        body = lambda: self._tune_all(trials, folder)  # noqa: E731
        thread = threading.Thread(target=body, name="ray-tune", daemon=True)
        thread.start()
        while thread.is_alive():
            if supervisor.ended:
                trials.stop()
                thread.join(_EVERY_S)
            else:
                supervisor.wait(_EVERY_S)
            self._take_events()
            trials.follow()
            show()
        self._take_events()
        trials.end("its trial was lost" if self._error is None else str(self._error))
        show()

    def _take_events(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._events.get_nowait()()

    def _tune_all(self, trials: _Trials, folder: Path) -> None:
        """Runs all trials; the body of a thread."""
        agents = [row.agent for row in trials.rows.values()]
        config, tune = self._config, self._tune
        try:
            tune.run(
                _trainable(tune, agents, max(1, int(config.agent_cpus)), self._joining),
                name=_FILES,
                storage_path=str(folder),
                config={"agent": tune.grid_search([agent.name for agent in agents])},
                resources_per_trial={"cpu": config.agent_cpus, "gpu": config.agent_gpus},
                max_concurrent_trials=config.parallel,
                scheduler=_scheduler(config.scheduler, agents, trials.ask),
                callbacks=[_callback(tune, trials)],
                stop=_stopper(tune, trials),
                trial_name_creator=_id_of,
                trial_dirname_creator=_id_of,
                raise_on_failed_trial=False,
                verbose=0,
            )
        except Exception as error:  # Ray raises anything
            self._error = error if isinstance(error, RunError) else RunError(f"Ray: {error}")


class _Trials:
    """The rows of agents that Tune runs.

    Threads: `ask` and `note_*` are called by Tune's, which leaves changes of rows to the main
    thread as events; all others by the main thread.
    """

    def __init__(
        self,
        rows: Mapping[str, Row],
        requests: Requests,
        events: queue.SimpleQueue[Event],
    ) -> None:
        self.rows, self._requests, self._events = rows, requests, events
        self._asked: set[str] = set()  # by the scheduler
        self._is_stopping = False

    @property
    def is_over(self) -> bool:
        """Whether the sweep was stopped and no agent runs any more."""
        return self._is_stopping and not self._live()

    def _live(self) -> list[Row]:
        return [row for row in self.rows.values() if row.state in ("running", "stopping")]

    def ask(self, name: str) -> None:
        """Asks an agent to end, as the scheduler decided."""
        if name not in self._asked:
            self._asked.add(name)
            self._requests.add(name)

    def note_start(self, name: str) -> None:
        """Notes that a trial has begun."""
        self._events.put(lambda: self._start(self.rows[name]))

    def note_hold(self, name: str, is_held: bool) -> None:
        """Notes whether an agent waits for another process that runs in its folder."""
        self._events.put(lambda: self.rows[name].hold(is_held))

    def note_end(self, name: str, why: str | None) -> None:
        """Notes that an agent has ended; why: it failed, or None."""
        by_scheduler = name in self._asked
        self._events.put(lambda: self._end(self.rows[name], why, by_scheduler))

    def stop(self) -> None:
        """Asks all agents to end, once; those that wait do not begin."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for row in self._live():
            row.stop()
        # An agent that has ended leaves its room to one that waits, which must know by then.
        for state in ("waiting", "stopping"):
            for name, row in self.rows.items():
                if row.state == state:
                    self._requests.add(name)

    def follow(self) -> None:
        """Reads the newest figures of all agents that run."""
        for row in self._live():
            row.follow()

    def end(self, why: str) -> None:
        """Notes the end of agents that Tune said nothing about: they were stopped, or `why`."""
        for row in self._live():
            was_saved = row.figures.step == 0 or has_ended_well(row.agent.folder)
            row.end(None if self._is_stopping and was_saved else why)

    def _start(self, row: Row) -> None:
        if not self._is_stopping:
            row.start()

    def _end(self, row: Row, why: str | None, by_scheduler: bool) -> None:
        if row in self._live():
            row.end(why, by_scheduler)


def _id_of(trial: Any) -> str:
    return str(trial.trial_id)


def _trainable(tune: Any, agents: Sequence[Agent], cores: int, joining: Joining) -> Any:
    """Returns the class of trials, which Tune makes an actor of."""
    by_name = {agent.name: agent for agent in agents}

    class AgentTrial(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: Mapping[str, Any]) -> None:
            self._trial = Trial(by_name[config["agent"]], cores, *joining)

        def step(self) -> dict[str, Any]:
            return self._trial.step()

        def cleanup(self) -> None:
            self._trial.end()

    return AgentTrial


def _scheduler(kind: str, agents: Sequence[Agent], ask: Callable[[str], None]) -> Any:
    """Returns the scheduler, whose decision to stop a trial becomes a request to its agent."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

    if kind == "none":
        return FIFOScheduler()

    class Asking(AsyncHyperBandScheduler):  # type: ignore[misc]
        def on_trial_result(self, controller: Any, trial: Any, result: Any) -> str:
            if super().on_trial_result(controller, trial, result) == TrialScheduler.STOP:
                ask(trial.config["agent"])
            return str(TrialScheduler.CONTINUE)

    first, last = rungs(min(agent.total_steps for agent in agents))
    return Asking(
        time_attr=STEP,
        metric=RETURN,
        mode="max",
        grace_period=first,
        max_t=last,
        reduction_factor=_FACTOR,
        stop_last_trials=False,
    )


def rungs(total_steps: int) -> tuple[int, int]:
    """Returns the steps of the first and the last comparison of asha."""
    first = max(1, total_steps // _FACTOR**_RUNGS)
    return first, first * _FACTOR ** (_RUNGS - 1)


def _callback(tune: Any, trials: _Trials) -> Any:
    class Noting(tune.Callback):  # type: ignore[misc]
        def on_trial_start(self, *, trial: Any, **_: Any) -> None:
            trials.note_start(trial.config["agent"])

        def on_trial_result(self, *, trial: Any, result: Mapping[str, Any], **_: Any) -> None:
            if result.get(ENDED):
                trials.note_end(trial.config["agent"], result[WHY] or None)
            else:
                trials.note_hold(trial.config["agent"], result[HELD])

        def on_trial_error(self, *, trial: Any, **_: Any) -> None:
            trials.note_end(trial.config["agent"], f"Ray lost it: {_last_line(trial.get_error())}")

    return Noting()


def _last_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "it did not say why"


def _stopper(tune: Any, trials: _Trials) -> Any:
    class Over(tune.Stopper):  # type: ignore[misc]
        """Ends Tune once no agent runs any more. Tune writes it to its files, hence __reduce__."""

        def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return trials.is_over

        def __reduce__(self) -> tuple[type, tuple[()]]:
            return object, ()

    return Over()
