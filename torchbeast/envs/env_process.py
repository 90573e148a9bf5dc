# SPDX-License-Identifier: Apache-2.0
"""Environments in a child process, for programs that must not run users' code themselves.

    program --- {"call": method, "arguments": ...} ---> env_process_main.py
            <-- {"answer": ...} -----------------------

Environments fork processes, set signal handlers and change settings of libraries. In a child
process none of this reaches the program. Arguments and answers are pickled and encoded in base64.
"""

from __future__ import annotations

import base64
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.core.envs.vec_env import VecStep
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError
from torchbeast.processes.child_process import ChildProcess, ProcessDied, end_all

_MAIN = "torchbeast.envs.env_process_main"
_POLL_S = 0.1  # between two calls of check_goes_on
_SAY_S = 5.0  # of a wait, before a message says what the program waits for


class Description(NamedTuple):
    """What a VecEnv says about itself."""

    env_id: str
    observation_space: ObservationSpace
    action_space: ActionSpace
    frame_stack: int


class EnvProcess:
    """A VecEnv whose environments run in a child process. Any thread may use it.

    Every method raises UsageError or RunError, with the environment's traceback, if the call or the
    process fails.
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
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calling = threading.Lock()
        arguments = {"env": spec.as_json(), "num_envs": num_envs, "render": render}
        self._child = ChildProcess(
            "environment", _MAIN, arguments, self._answers.put, on_end=self._answers.put
        )
        try:
            described: Description = self._answer("be made")
        except BaseException:
            self._child.ask_to_end()
            self._child.give_up("was ended")
            raise
        self.env_id, self.observation_space, self.action_space, self.frame_stack = described

    def reset(self, seed: int) -> ArrayNest:
        observation: ArrayNest = self._call("reset", seed)
        return observation

    def step(self, action: ArrayNest) -> VecStep:
        """Executes the actions. The environments' info does not leave their process."""
        step: VecStep = self._call("step", action)
        return step

    def render(self) -> np.ndarray | None:
        """Returns a picture of environment 0, uint8 [H, W, 3], or None when it renders no array."""
        picture: np.ndarray | None = self._call("render")
        return picture

    def check_goals(self) -> None:
        """Raises EnvError unless the environment has goals, see goals.py."""
        self._call("check_goals")

    def outcome(self, achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns what other goals would have brought, see goals.py."""
        outcome: tuple[np.ndarray, np.ndarray] = self._call("outcome", achieved, desired)
        return outcome

    def close(self) -> None:
        """Closes the environments, without waiting for them; kills a process that does not end.

        The thread is not a daemon: Python waits for it when the program exits.
        """
        threading.Thread(target=end_all, args=([self._child],), name="close environment").start()

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._calling:
            self._child.send({"call": method, "arguments": packed(arguments)})
            return self._answer(f"answer a call of {method}")

    def _answer(self, what: str) -> Any:
        """Waits for the next answer; what: the environment does meanwhile, for a message."""
        say_at = time.monotonic() + _SAY_S
        while True:
            try:
                said = self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                self._check_goes_on()
                if time.monotonic() >= say_at:
                    print(f"Still waiting for {self._name} to {what}.", flush=True)
                    say_at = math.inf
                continue
            if isinstance(said, Exception):
                self._answers.put(said)  # for later calls
                raise RunError(f"{self._name}: {said}") if type(said) is ProcessDied else said
            return unpacked(said["answer"])


def packed(value: Any) -> str:
    """Returns a value as text for a line of JSON."""
    return base64.b64encode(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).decode()


def unpacked(text: str) -> Any:
    """Returns the value; only for text from this program's own child or parent."""
    return pickle.loads(base64.b64decode(text))
