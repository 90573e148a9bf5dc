# SPDX-License-Identifier: Apache-2.0
"""Publishes weights from the learner to the threads and processes that act.

Threads of the learner's process read `PublishedWeights`, an immutable snapshot that each thread
loads into its own replica of the model between two batches. Workers in other processes read
`SharedWeights`, a ring in shared memory:

    learner -- publish --> [ v4 | v1 | v2 | v3 ] -- refresh --> workers' own copies of the model
                             a ring, behind the number of the newest version

Version v is in place v % size. A place is locked while it is written or read. The kernel releases
the file locks of a process when it ends, so a worker that is killed while reading blocks nobody. A
worker that is stopped does not block the learner either: the learner skips publishing a version
whose place is still being read.

Child processes inherit the ring's descriptor. Other processes on the learner's machine open it
through /proc. If they cannot (on other nodes, on systems without /proc, in containers with their
own process IDs, as another user), they are sent the weights as bytes (`SentWeights`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.collect.shared_memory import SharedFile, aligned

_HEADER = 4096  # bytes before the first place: the newest version, then the version of each place
_NOTHING = -1  # in a place that was never written, or is being written

Packed = np.ndarray
"""The bytes of a state_dict, in the order of its entries."""


def ring_size(fixed_lag: int | None) -> int:
    """Returns the number of versions of the weights that a ring must hold."""
    return 4 if fixed_lag is None else fixed_lag + 2


def _room(tensor: Tensor) -> int:
    """Returns the bytes that an entry of a state_dict occupies in memory."""
    return aligned(max(tensor.numel(), 1) * tensor.element_size())


def _size_of(model: nn.Module) -> int:
    """Returns the bytes that a model's state_dict occupies in memory."""
    return sum(map(_room, model.state_dict().values()))


def unpacked(weights: Any, model: nn.Module, offset: int = 0) -> dict[str, Tensor]:
    """Returns the entries of a state_dict with the dtypes and shapes of the model's.

    They share memory with `weights`, which may be read-only: do not write to them then. offset: of
    the first entry, in bytes.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        count = max(tensor.numel(), 1)
        flat = torch.frombuffer(weights, dtype=tensor.dtype, count=count, offset=offset)
        tensors[name] = flat[: tensor.numel()].view(tensor.shape)
        offset += _room(tensor)
    return tensors


class SharedWeights(SharedFile):
    """A ring of the newest versions of a model's weights. One process publishes, others read.

    num_bytes: of all places of the ring.
    """

    def __init__(
        self, model: nn.Module, version: int = 0, size: int = 4, descriptor: int | None = None
    ) -> None:
        """Creates a ring and publishes `model`, or opens the ring of `descriptor`.

        model: with the same shapes in every process. size: number of versions in the ring.
        """
        self.size = size
        self._stride = _size_of(model)
        self.num_bytes = size * self._stride
        super().__init__(_HEADER + max(self.num_bytes, 1), descriptor)
        self._versions = np.frombuffer(self.bytes, np.int64, count=size + 1)
        self._places = [
            unpacked(self.bytes, model, _HEADER + place * self._stride) for place in range(size)
        ]
        self.on_publish: Callable[[], None] = lambda: None
        if descriptor is None:
            self._versions[1:] = _NOTHING
            self.publish(model, version)

    @property
    def version(self) -> int:
        """The newest published version."""
        return int(self._versions[0])

    @property
    def newest(self) -> tuple[int, Packed]:
        """The newest version and a copy of its weights, for the process that publishes.

        It does not wait: if the place was overwritten meanwhile, it copies again.
        """
        while True:
            version = self.version
            start = _HEADER + version % self.size * self._stride
            weights = np.frombuffer(self.bytes, np.uint8, self._stride, start).copy()
            if self._holds(version):
                return version, weights

    @torch.no_grad()
    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as the newest version.

        Skips this version if a worker is still reading the old version in its place, no matter for
        how long: the next version has another place. With a fixed lag no worker reads such an old
        version.
        """
        place = version % self.size
        try:
            with self._locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
                self._versions[1 + place] = _NOTHING
                for name, tensor in model.state_dict().items():
                    self._places[place][name].copy_(tensor)
                self._versions[1 + place] = version
        except (BlockingIOError, PermissionError):  # systems differ
            return
        self._versions[0] = version
        self.on_publish()

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the wanted version, or the newest, into `replica`; returns that version.

        held: the version that `replica` already holds, so that it need not be loaded again; None:
        unknown. Raises LookupError if the wanted version is not in the ring.
        """
        while True:
            version = self.version if wanted is None else wanted
            if version == held or self._load(replica, version):
                return version
            if wanted is not None:
                raise LookupError(
                    f"version {wanted} is not among the {self.size} versions up to {self.version}"
                )

    def _load(self, replica: nn.Module, version: int) -> bool:
        """Loads a version; returns False if a newer version has overwritten it."""
        place = version % self.size
        with self._locked(place, fcntl.LOCK_SH):
            if not self._holds(version):
                return False
            replica.load_state_dict(self._places[place])
        return True

    def _holds(self, version: int) -> bool:
        """Returns whether the place of a version still has its complete weights."""
        return int(self._versions[1 + version % self.size]) == version

    @contextmanager
    def _locked(self, place: int, kind: int) -> Iterator[None]:
        fcntl.lockf(self.descriptor, kind, 1, place, os.SEEK_SET)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, place, os.SEEK_SET)


class RingAddress(NamedTuple):
    """How processes on the same node find the file of a ring of weights.

    Device and inode identify the file, because in a container the path may lead to the file of
    another process.
    """

    node: str  # its ID
    file: int | str  # an inherited descriptor, or a path
    device: int
    inode: int
    size: int  # of the ring: number of versions


def address_of(ring: SharedWeights, node: str, is_inherited: bool = False) -> RingAddress | None:
    """Returns the address of this process's ring; None for a learner outside the cluster.

    node: the ID of the node on which this process runs; "" outside the cluster.
    """
    if not node and not is_inherited:
        return None
    found = os.fstat(ring.descriptor)
    path = f"/proc/{os.getpid()}/fd/{ring.descriptor}"
    file = ring.descriptor if is_inherited else path
    return RingAddress(node, file, found.st_dev, found.st_ino, ring.size)


def opened(address: RingAddress, model: nn.Module) -> SharedWeights | None:
    """Opens the ring, which holds weights of this model; None if it cannot be reached."""
    try:
        found = os.stat(address.file)  # first, because opening anything but a file may block
        if (found.st_dev, found.st_ino) != (address.device, address.inode):
            return None
        is_path = isinstance(address.file, str)  # a descriptor stays open, because it is inherited
        with open(address.file, "r+b", buffering=0, closefd=is_path) as file:
            return SharedWeights(model, size=address.size, descriptor=file.fileno())
    except (OSError, ValueError):  # no such process, not permitted, another size
        return None


class _Newest:
    """The newest version of the weights. One thread replaces it, any number of threads read it."""

    # The version, and what loads its weights into a model; replaced in one assignment.
    _newest: tuple[int, Callable[[nn.Module], object]]

    @property
    def version(self) -> int:
        """The newest version."""
        return self._newest[0]

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the newest weights unless `replica` already holds them; returns their version.

        held: the version that `replica` holds; None: unknown. Raises LookupError if `wanted` is not
        the newest version.
        """
        version, load = self._newest
        if wanted not in (None, version):
            raise LookupError(f"version {wanted} is not the newest one, {version}")
        if version != held:
            load(replica)
        return version


class SentWeights(_Newest):
    """The newest weights that a worker has received. Any thread receives, one thread acts."""

    def __init__(self) -> None:
        self.receive(0, np.empty(0))  # which cannot be loaded

    def receive(self, version: int, weights: Packed) -> None:
        """Replaces the newest weights."""
        self._newest = version, lambda replica: replica.load_state_dict(unpacked(weights, replica))


@torch.no_grad()
def packed(model: nn.Module) -> Packed:
    """Returns a copy of the model's weights, on the CPU."""
    found = np.zeros(_size_of(model), np.uint8)
    views = unpacked(found, model)
    for name, tensor in model.state_dict().items():
        views[name].copy_(tensor)
    return found


class PublishedWeights(_Newest):
    """Holds the newest snapshot. One thread publishes, any number of threads read."""

    def __init__(self, model: nn.Module, version: int = 0) -> None:
        self.publish(model, version)

    @torch.no_grad()
    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as this version."""
        tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        gpus = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
        written = None
        if gpus:  # which need not be the thread's current one
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record(torch.cuda.current_stream(gpus[0]))

        def load(replica: nn.Module) -> None:
            """The reader's CUDA stream waits for the copy, and keeps its memory alive."""
            if written is not None:
                written.wait(torch.cuda.current_stream(gpus[0]))
            replica.load_state_dict(tensors)
            for tensor in tensors.values():
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))

        self._newest = version, load
