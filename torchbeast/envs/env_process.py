# SPDX-License-Identifier: Apache-2.0
"""Environments in a child process, for programs that must not run users' code themselves.

    program --- (method, arguments) ---> env_process_main.py
            <-- answer -----------------

Environments fork processes, set signal handlers and change settings of libraries. In a child
process none of this reaches the program. Arguments and answers are pickled, and travel over a
socket. An error of an environment ends its process, which reports it on stdout.

An environment with goals also says what a step would have brought, had the goal been another. Its
observation is a dict with `achieved_goal` and `desired_goal`, and it has the method
compute_reward(achieved_goal, desired_goal, info), which takes arrays [N, *shape] of any N, as the
environments of Gymnasium-Robotics do. If it also has compute_terminated with the same arguments,
that says where an episode would have ended; otherwise none would. The outermost wrapper that has
a method computes the outcome. Replays do not store infos, so the methods must not read `info`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from typing import Any, NoReturn

import numpy as np

from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvError, EnvSpec
from torchbeast.errors import RunError
from torchbeast.fleets.child_process import ChildProcess, ProcessDied, end_all
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import waiting_for

_MAIN = "torchbeast.envs.env_process_main"
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
        self._name = spec.name
        self._check_goes_on = check_goes_on
        self._error: Exception | None = None  # why no call can be answered
        self._has_ended = threading.Event()
        self._calling = threading.Lock()
        self._connection, theirs = Pipe()
        with theirs:
            self._child = ChildProcess(
                "environment",
                _MAIN,
                {
                    "env": spec.as_json(),
                    "num_envs": num_envs,
                    "render": render,
                    "socket": theirs.fileno(),
                },
                on_report=lambda report: None,
                on_end=self._end,
                pass_fds=(theirs.fileno(),),
            )
        try:
            described = self._answer(f"{self._name} to be made")
        except BaseException:
            self._child.ask_to_end()
            self._child.give_up("was ended")
            raise
        self.env_id: str = described["env_id"]
        self.observation_space: ObservationSpace = described["observation_space"]
        self.action_space: ActionSpace = described["action_space"]
        self.frame_stack: int = described["frame_stack"]
        self.num_agents: int = described["num_agents"]

    def reset(self, seed: int) -> ArrayNest:
        return self._call("a reset", "reset", seed)

    def step(self, action: ArrayNest) -> VecStep:
        """Executes the actions. The environments' info does not leave their process."""
        return self._call("a step", "step", action)

    def render(self) -> np.ndarray | None:
        """Returns a picture of environment 0, uint8 [H, W, 3], or None when it renders no array."""
        return self._call("a picture", "render")

    def check_goals(self) -> None:
        """Raises EnvError unless the environment has goals, see outcome_of."""
        self._call("the goals", "check_goals")

    def outcome(self, achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what other goals would have brought, see outcome_of."""
        what = "the rewards of other goals"
        return self._call(what, "outcome", achieved, desired)

    def close(self) -> None:
        """Closes the environments and waits for the end of their process, which is killed if it
        takes more than a few seconds.
        """
        self._end(RunError(f"{self._name} has been closed"))
        end_all([self._child])

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        """Returns the answer of a method; what: a noun phrase for it."""
        with self._calling:
            self._check_goes_on()
            if self._error is not None:
                raise self._error
            try:
                with contextlib.suppress(OSError):  # the process has ended: `_answer` says why
                    self._connection.send((method, arguments))
                return self._answer(f"{what} of {self._name}")
            except BaseException:
                # The answer may still arrive, and a later call would take it for its own.
                self._end(RunError(f"{self._name}: an earlier call was abandoned"))
                self._child.ask_to_end()
                raise

    def _answer(self, what: str) -> Any:
        """Waits for the next answer, or the end of the process; what: a noun phrase for it."""
        with contextlib.suppress(EOFError, OSError):  # the process ends: `_end` hears why
            if self._is_there(what):
                return self._connection.recv()
        while not self._has_ended.wait(_POLL_S):
            self._check_goes_on()
        raise self._error or AssertionError("set before it has ended")

    def _is_there(self, what: str) -> bool:
        """Waits until an answer, or the end of all answers, can be read; returns False once the
        process has ended: one that the environment has forked may keep the socket open.
        """
        if self._connection.poll(_POLL_S):
            return True
        with waiting_for(what):
            while not self._has_ended.is_set():
                self._check_goes_on()
                if self._connection.poll(_POLL_S):
                    return True
        return False

    def _end(self, error: Exception) -> None:
        """Lets all calls fail from now on; the first error stays."""
        if type(error) is ProcessDied:
            error = RunError(f"{self._name}: {error}")
        self._error = self._error or error
        self._has_ended.set()


Outcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def outcome_of(spec: EnvSpec, supervisor: Supervisor) -> Outcome:
    """Returns a function of achieved and desired goals [N, *shape] that gives rewards float32 [N]
    and terminated bool [N].

    It asks an environment that is never stepped, in a process that ends with the run. Raises
    UsageError when that has no goals.
    """
    whole = dataclasses.replace(
        spec, options=dataclasses.replace(spec.options, observation_keys=())
    )
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
        self._refuse(f"the info's {key!r}")

    def __iter__(self) -> Iterator[str]:
        self._refuse("the info's entries")

    def __len__(self) -> int:
        return 0

    def _refuse(self, what: str) -> NoReturn:
        raise EnvError(
            f"{self._name}: compute_reward or compute_terminated reads {what}, but replays do not "
            "store infos: compute rewards from the goals alone, for example with more entries in "
            "achieved_goal, or remove hindsight_share"
        )


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
