# SPDX-License-Identifier: Apache-2.0
"""The earlier run that a run resumes, and the settings that its checkpoint determines."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import in_family
from torchbeast.core.algos import registry
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.base.specs import ActorSpec, kwargs_of
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError
from torchbeast.reporting.display import Progress
from torchbeast.reporting.run_folder import run_path
from torchbeast.run import checkpoint as checkpoints

_log = logging.getLogger("torchbeast.earlier_run")


class EarlierRun:
    """The run to resume. Without a checkpoint it represents a new run.

    Attributes:
        recorded: The recorded settings; {} without a checkpoint.
        callbacks: The states of callbacks, by name.
        env_options: The options that the environments were given last; None: none.
    """

    def __init__(self, found: checkpoints.FoundCheckpoint | None = None) -> None:
        """found: its checkpoint, if there is one."""
        self._found = found
        self._saved: Mapping[str, Any] = {} if found is None else found.checkpoint
        self._path = Path() if found is None else found.path
        self.recorded: Mapping[str, Any] = self._saved.get("flags", {})
        self.callbacks: Mapping[str, Any] = self._saved.get("callbacks", {})
        self.env_options: Mapping[str, Any] | None = self._saved.get("env_options")

    @classmethod
    def newest(cls, path: Path, needed: Sequence[str] = checkpoints.KEYS) -> EarlierRun:
        """Reads the newest checkpoint of a run, if it has one; needed: keys that the checkpoint
        must have.
        """
        path = run_path(path)
        return cls(checkpoints.load_newest(path, needed) if checkpoints.existing(path) else None)

    def go_on(self, newest: Path) -> None:
        """Makes the checkpoint the newest, if newer ones are damaged, and warns about them.

        The process that continues the run calls it before it writes a checkpoint.
        """
        if self._found is not None and (said := checkpoints.describe_fallback(self._found, newest)):
            _log.warning("%s%s", said, checkpoints.put_in_place(self._found, newest))
            self._path = newest

    def seed(self, asked: int | None) -> int:
        """Returns the seed `asked`, or else the recorded seed, or else a random one."""
        if asked is not None:
            return int(asked)
        recorded = self.recorded.get("seed")
        return secrets.randbits(31) if recorded is None else int(recorded)

    def actor(self, asked: ActorSpec, algo: type[Algorithm[Any]] | None = None) -> ActorSpec:
        """Returns the spec of the network that the algorithm trains, with the inputs that its
        weights were trained on. algo: None to evaluate it.

        Its name is the recorded name if `asked` has "auto" or the name that the user gave before,
        and so for its keyword arguments.
        """
        usual = asked if algo is None else in_family(asked, algo.family, algo.network)
        if not self._saved:
            return usual
        known = checkpoints.actor_spec(self._saved)
        is_open = asked.name in ("auto", self.recorded.get("model"))
        is_same = asked.kwargs == kwargs_of(self.recorded)
        return dataclasses.replace(
            asked,
            name=known.name if is_open else usual.name,
            kwargs=known.kwargs if is_same else asked.kwargs,
            reward_input=known.reward_input,
            reads_values=known.reads_values,
        )

    def check_same_model(self, now: ActorSpec) -> None:
        """Raises UsageError for another network, even one with weights of the same shapes."""
        if not self._saved:
            return
        before = checkpoints.actor_spec(self._saved)
        if now.name != before.name != "auto":
            raise self._other("model", before.name, now.name)
        if now.kwargs != before.kwargs:
            kwargs, others = (shlex.quote(json.dumps(spec.kwargs)) for spec in (before, now))
            raise self._other("model_kwargs", kwargs, others)
        # If it was not recorded, loading the weights reveals a mismatch.
        has_memory = bool(self.recorded.get("use_lstm", now.use_lstm))
        if now.use_lstm != has_memory:
            raise self._other("use_lstm", has_memory, now.use_lstm)

    def check_fits(self, agent: Agent) -> None:
        """Raises UsageError for an agent of other actions or weights."""
        if not self._saved:
            return
        spaces, now = checkpoints.spaces(self._saved), agent.action_space
        if spaces is not None and spaces[1] != now:  # another box would scale actions anew
            raise self._other("action_space", spaces[1], now, "use the environment as it was")
        checkpoints.check_model(agent.model, self._saved, self._path)

    def _other(
        self, name: str, before: object, now: object, remedy: str = "repeat that setting"
    ) -> UsageError:
        return UsageError(
            f"{name} must be {before}, as in the run {self._path.parent.name}, not {now}: "
            f"{remedy}, or start another run"
        )

    def check_same_algorithm(self, now: str) -> None:
        """Raises UsageError for another algorithm. Runs without a record used the default one."""
        before = self.recorded.get("algo", registry.DEFAULT) if self.recorded else now
        if now != before:
            raise self._other("algo", before, now)

    def check_same_environment(self, now: str, others_serve: bool) -> None:
        """Raises UsageError for another environment.

        others_serve: whether servers that are already running decide the environment.
        """
        before = self.recorded.get("env")
        if before is not None and before != now:
            raise self._other(
                "env", before, now, "start servers of it" if others_serve else "use that"
            )

    def restore(self, step: OptimiserStep[Any]) -> None:
        """Restores `step` and torch's random generators from the checkpoint."""
        if self._saved:
            checkpoints.resume(step, self._saved, self._path)

    def progress(self) -> Progress:
        """Returns the progress of the earlier run; zero without a checkpoint."""
        progress = Progress()
        progress.load_state_dict(self._saved.get("stats", {}))
        return progress
