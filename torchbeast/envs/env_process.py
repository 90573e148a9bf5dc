# SPDX-License-Identifier: Apache-2.0
"""Environments in a child process, for programs that must not run users' code themselves.

    program --- (method, arguments) ---> EnvWorker in env_worker.py
            <-- answer -----------------

Environments fork processes, set signal handlers and change settings of libraries. In a child
process, the worker of a LocalFleet, none of this reaches the program. An error of an environment
ends its process.

An environment with goals also says what a step would have brought, had the goal been another. Its
observation is a dict with `achieved_goal` and `desired_goal`, and it has the method
compute_reward(achieved_goal, desired_goal, info), which takes arrays [N, *shape] of any N, as the
environments of Gymnasium-Robotics do. If it also has compute_terminated with the same arguments,
that says where an episode would have ended; otherwise none would. The outermost wrapper that has
a method computes the outcome. Replays do not store infos, so the methods must not read `info`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvError, EnvSpec
from torchbeast.errors import RunError
from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.fleet import LocalFleet, WorkerLost, error_in
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import waiting_for

_WORKER = "torchbeast.envs.env_worker:EnvWorker"
_POLL_S = 0.1  # between two calls of check_goes_on


class EnvProcess:
    """A VecEnv whose environments run in a child process. Any thread may use it.

    Every method raises UsageError or RunError, with the environment's traceback, if the call or the
    process fails. After a call that raised an exception, every later call raises one too.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        *,
        render: bool = False,
        check_goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the process and waits until it has made the environments.

        check_goes_on: called several times a second during every wait; raises an exception to give
            up.
        """
        self.num_envs = num_envs
        self.spec, self._name = spec, spec.name
        self._check_goes_on = check_goes_on
        self._error: Exception | None = None  # why no call can be answered
        self._calling = threading.Lock()
        self._fleet = LocalFleet(_WORKER, {})
        self._worker = self._fleet.worker("environment")
        try:
            what = f"{self._name} to be made"
            described = self._call(what, "start", spec, num_envs, render)
        except BaseException:
            self._worker.kill()
            raise
        self.env_id: str = described["env_id"]
        self.observation_space: ObservationSpace = described["observation_space"]
        self.action_space: ActionSpace = described["action_space"]
        self.frame_stack: int = described["frame_stack"]
        self.num_agents: int = described["num_agents"]

    @property
    def has_failed(self) -> bool:
        """Whether every later call fails: a call has failed, or the process has ended."""
        return self._error is not None or self._worker.process.has_ended

    def reset(self, seed: int) -> ArrayNest:
        return self._call(f"a reset of {self._name}", "reset", seed)

    def step(self, action: ArrayNest) -> VecStep:
        """Executes the actions. The environments' info does not leave their process."""
        return self._call(f"a step of {self._name}", "step", action)

    def render(self) -> np.ndarray | None:
        """Returns a picture of environment 0, uint8 [H, W, 3], or None when it renders no array."""
        return self._call(f"a picture of {self._name}", "render")

    def check_goals(self) -> None:
        """Raises EnvError unless the environment has goals, see outcome_of."""
        self._call(f"the goals of {self._name}", "check_goals")

    def outcome(self, achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what other goals would have brought, see outcome_of."""
        what = f"the rewards of other goals of {self._name}"
        return self._call(what, "outcome", achieved, desired)

    def close(self) -> None:
        """Closes the environments and waits for the end of their process, which is killed if it
        takes more than a few seconds.
        """
        self._fleet.end()

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        """Returns the answer of the worker; what: a noun phrase for it."""
        with self._calling:
            self._check_goes_on()
            if self._error is not None:
                raise self._error
            self._error = RunError(f"{self._name}: an earlier call was abandoned")
            try:
                answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._worker.call(answers.put, "answer", method, *arguments)
                answer = self._next(answers, what)
                self._error = self._named(error_in(answer))
                if self._error is not None:
                    raise self._error
            except BaseException:
                self._worker.process.ask_to_end()
                raise
            return answer

    def _next(self, answers: queue.SimpleQueue[Any], what: str) -> Any:
        """Waits for the answer, or the end of the process."""
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=_POLL_S)
        with waiting_for(what):
            while True:
                self._check_goes_on()
                with contextlib.suppress(queue.Empty):
                    return answers.get(timeout=_POLL_S)

    def _named(self, error: Exception | None) -> Exception | None:
        """Returns the error with the environment's name if its process has ended."""
        if isinstance(error, WorkerLost):
            return RunError(f"{self._name} has been closed")
        return RunError(f"{self._name}: {error}") if isinstance(error, ProcessDied) else error


Spaces = tuple[ObservationSpace, ActionSpace, int]
"""Observation space and action space of one environment, and the number of stacked frames."""


def spaces_of(spec: EnvSpec, check_goes_on: Callable[[], None]) -> Spaces:
    """Returns the spaces of an environment, which a child process makes and closes.

    check_goes_on: see EnvProcess.
    """
    count = len(spec.tasks)  # an environment of each
    spec = spec.with_shares((1,) * count * (count > 1))
    with contextlib.closing(EnvProcess(spec, count, check_goes_on=check_goes_on)) as env:
        return env.observation_space, env.action_space, env.frame_stack


Outcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def outcome_of(spec: EnvSpec, supervisor: Supervisor) -> Outcome:
    """Returns a function of achieved and desired goals [N, *shape] that gives rewards float32 [N]
    and terminated bool [N].

    It asks an environment that is never stepped, in a process that ends with the run. Raises
    UsageError when that has no goals.
    """
    whole = spec.with_options(observation_keys=())
    env = EnvProcess(whole, 1, check_goes_on=supervisor.check_goes_on)
    ending = threading.Thread(target=env.close, name="close environment")
    supervisor.on_close(ending.start)  # without waiting for it
    env.check_goals()
    return env.outcome


class _NoInfo(Mapping[str, Any]):
    """The info that compute_reward gets; reading it raises an EnvError, because replays do not
    store infos.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, key: object) -> Any:
        raise EnvError(
            f"{self._name}: compute_reward or compute_terminated reads the info's {key!r}, but "
            "replays do not store infos: compute rewards from the goals alone, for example with "
            "more entries in achieved_goal, or remove hindsight_share"
        )

    def __iter__(self) -> Iterator[str]:
        return self["entries"]

    def __len__(self) -> int:
        return 0


def outcome_in(env: VecEnv, name: str) -> Outcome:
    """Returns the outcome function of an environment of this name.

    It is reset here, and may be closed afterwards. Raises EnvError unless it computes rewards from
    goals alone.
    """
    says: Callable[[str], Any] = getattr(
        env, "outermost", lambda method: getattr(env, method, None)
    )
    rewards_of = says("compute_reward")
    if rewards_of is None:
        raise EnvError(
            f"{name} has no compute_reward(achieved_goal, desired_goal, info), which hindsight "
            "needs: remove hindsight_share"
        )
    ends_of = says("compute_terminated") or (lambda achieved, *_: np.zeros(len(achieved)))
    info = _NoInfo(name)

    def outcome(achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rewards = np.asarray(rewards_of(achieved, desired, info), np.float32)
        terminated = np.asarray(ends_of(achieved, desired, info), bool)
        if not terminated.ndim:  # Gymnasium-Robotics returns False for any number of goals
            terminated = np.broadcast_to(terminated, achieved.shape[:1])
        for method, found in (("compute_reward", rewards), ("compute_terminated", terminated)):
            if found.shape != achieved.shape[:1]:
                raise EnvError(
                    f"{name}: {method} returns shape {list(found.shape)} for "
                    f"{len(achieved)} goals, expected [{len(achieved)}]"
                )
        return rewards, terminated

    seen: Any = env.reset(0)
    goals = (np.repeat(seen[key], 2, axis=0) for key in ("achieved_goal", "desired_goal"))
    outcome(*goals)  # raises before the run begins
    return outcome
