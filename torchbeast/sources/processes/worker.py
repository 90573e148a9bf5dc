# SPDX-License-Identifier: Apache-2.0
"""One worker of a fleet: a group of environments, and a policy that acts in all of them at once.

    start()      makes environments and network, with the weights that it is given
    play()       one rollout, as numpy arrays                              one at a time
    load()       newer weights, which act from the next step on            beside them
                 (a worker on the learner's machine reads them by itself)
    activity()   current stage, and seconds in each stage                  beside them
    end()        closes the environments                                   beside them

Threads: `start` and `play` are called by one thread, `load` by a second, the others by a third.
Nothing here knows of Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.core.nest_py import map_leaves
from torchbeast.processes.child_main import failure
from torchbeast.sources.processes.activity import local_activity
from torchbeast.sources.processes.player import Acting, Player, acting
from torchbeast.sources.processes.rollout_buffers import RolloutArrays, SlotWriter, slot_fields
from torchbeast.sources.processes.shared_weights import SharedWeights
from torchbeast.sources.processes.weights_ring import opened

END_S = 3.0
"""Seconds that `end` waits for the current step; a stuck environment is abandoned."""

Packed = Mapping[str, np.ndarray]
"""The entries of a state_dict as bytes, which every dtype has in numpy."""


class ActivityReport(NamedTuple):
    """A worker's current stage, and the time it has spent in each since its start."""

    stage: str
    seconds_in_stage: float
    seconds: dict[str, float]  # by stage
    steps: int  # of all its environments


class Started(NamedTuple):
    """A worker's environments and network are made."""

    activity: ActivityReport
    reads_weights: bool  # from the learner's memory, so that none need be sent


class Played(NamedTuple):
    """One rollout."""

    arrays: RolloutArrays
    activity: ActivityReport


class Failed(NamedTuple):
    """An exception in a worker."""

    error: str
    usage: bool  # the user can avoid it by other flags
    is_consequence: bool = False  # of the end of another worker


class Ended(Exception):
    """The worker was asked to end."""


class RolloutWorker:
    """Plays rollouts of its environments on request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # held while environments are used
        self._closing = ExitStack()
        self._begin_again()

    def _begin_again(self) -> None:
        self._weights = ReceivedWeights()
        self._activity = local_activity()
        self._activity.start()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before every line that the worker prints

    def start(
        self, arguments: Mapping[str, Any], version: int, weights: Packed
    ) -> Started | Failed:
        """Makes environments and network.

        arguments: those of `acting`, and mode, first_env (number of the first environment), ring
            (the RingAddress of the learner's weights, or None).
        """
        with self._lock:
            self._begin_again()
            try:
                self._weights.receive(version, weights)
                self._prepare(arguments, self._closing.enter_context(acting(arguments)))
            except Exception as error:
                return _failed(error)
            self._activity.enter("queueing")
        return Started(self.activity(), self._weights.is_read)

    def _prepare(self, arguments: Mapping[str, Any], made: Acting) -> None:
        self._arguments, self._loop = arguments, made.loop
        fields = slot_fields(made.rollouts, arguments["num_envs"])
        self._slot = map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), fields)
        actor, mode, weights = made.rollouts.agent.model, arguments["mode"], self._weights
        if ring := opened(arguments["ring"], actor):
            weights.read_from(ring)
        self._player = Player(made.loop, actor, weights, self._activity, mode)

    def play(self, rollout_index: int) -> Played | Failed | None:
        """Plays one rollout; None: the worker was asked to end.

        The arrays are overwritten by the next call.
        """
        arguments = self._arguments
        with self._lock:
            try:
                state, first_env = self._loop.acted.state, arguments["first_env"]
                writer = SlotWriter(self._slot, state, first_env, rollout_index)
                self._player.play(writer, arguments["unroll_length"], wanted=None)
            except Ended:
                return None
            except Exception as error:
                return _failed(error)
        return Played(writer.written(), self.activity())

    def load(self, version: int, weights: Packed) -> None:
        """Hands over newer weights, which are used from the next step on."""
        self._weights.receive(version, weights)

    def activity(self) -> ActivityReport:
        """Returns the current stage, and totals since the start."""
        stage, seconds = self._activity.present()
        return ActivityReport(stage, seconds, self._activity.seconds(), self._activity.steps())

    def end(self) -> None:
        """Ends `play` after its current step and closes the environments, if that step ends."""
        self._weights.close()
        if self._lock.acquire(timeout=END_S):
            try:
                self._closing.close()
            finally:
                self._lock.release()


class ReceivedWeights:
    """The newest weights that a worker was given. Any thread receives, one acts."""

    def __init__(self) -> None:
        self._ring: SharedWeights | None = None
        self._newest: tuple[int, Packed] = (0, {})
        self._closed = False

    @property
    def is_read(self) -> bool:
        """Whether the worker reads its weights by itself."""
        return self._ring is not None

    @property
    def version(self) -> int:
        """Newest version."""
        return self._newest[0] if self._ring is None else self._ring.version

    def read_from(self, ring: SharedWeights) -> None:
        """Reads the learner's own memory of weights from now on, in place of what was given, which
        is let go: it would keep its memory in the object store.

        Call it before the first `refresh`, or never: a replica that acts with given weights where
        they are cannot be loaded with others.
        """
        self._ring = ring
        self._newest = (0, {})

    def receive(self, version: int, weights: Packed) -> None:
        """Replaces the newest weights."""
        self._newest = (version, weights)  # in one assignment

    def close(self) -> None:
        """Lets every further `refresh` raise Ended."""
        self._closed = True

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the newest weights unless `replica` holds them; returns their version."""
        if self._closed:
            raise Ended
        if self._ring is not None:
            return self._ring.refresh(replica, held, wanted)
        version, weights = self._newest
        if version != held:
            _use(unpacked(weights, replica), replica)
        return version


def packed(model: nn.Module) -> Packed:
    """Returns a copy of the model's weights, on the CPU."""
    return packed_state(model.state_dict())


def packed_state(state: Mapping[str, Tensor]) -> Packed:
    """Returns a copy of the entries of a state_dict, on the CPU."""
    return {name: _as_bytes(tensor) for name, tensor in state.items()}


def unpacked(weights: Packed, model: nn.Module) -> dict[str, Tensor]:
    """Returns the entries of a state_dict with the dtypes and shapes of the model's.

    They share memory with `weights`, which may be read-only: do not write to them.
    """
    return {name: _from_bytes(weights[name], like) for name, like in model.state_dict().items()}


def _use(state: Mapping[str, Tensor], replica: nn.Module) -> None:
    """Lets the model act with parameters where they are: all workers of a node share that memory.

    A copy of all else: a network may write to its buffers, and others would see it. Parameters and
    buffers remain the same objects, as a network may refer to them by other names too.
    """
    written = _written_by_forward(replica)
    parameters = dict(replica.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        parameter.data = state[name].clone() if name in written else state[name]
    others = {name: entry for name, entry in state.items() if name not in parameters}
    replica.load_state_dict(others, strict=False)


def _written_by_forward(model: nn.Module) -> set[str]:
    """Returns the names of parameters that acting writes to: embeddings that it renormalises."""
    return {
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    }


def _as_bytes(tensor: Tensor) -> np.ndarray:
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    array: np.ndarray = copy.reshape(-1).view(torch.uint8).numpy()
    return array


def _from_bytes(array: np.ndarray, like: Tensor) -> Tensor:
    if not like.numel():  # numpy's strides of nothing are none that torch can view
        return torch.empty_like(like, device="cpu")
    return torch.from_numpy(array).view(like.dtype).reshape(like.shape)


def _failed(error: Exception) -> Failed:
    report = failure(error)
    return Failed(report["error"], report["usage"])
