# SPDX-License-Identifier: Apache-2.0
"""Publishes weights from the learner to actor processes through shared memory.

    learner -- publish --> [ v4 | v1 | v2 | v3 ] -- refresh --> actors' own copies of the model
                             a ring, behind the number of the newest version

Version v is in place v % size. A place is locked while it is written or read. The kernel releases a
file's locks when their process ends, so an actor that is killed while it reads blocks nobody. The
learner waits for a reader only if that reader is a whole ring behind.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.sources.shared_memory import SharedFile, aligned

_HEADER = 4096  # bytes before the first place: the newest version, then the version of each place
_NOTHING = -1  # in a place that was never written, or is just written


class SharedWeights:
    """A ring of the newest versions of a model's weights. One process publishes, others read."""

    def __init__(
        self, model: nn.Module, version: int = 0, size: int = 4, descriptor: int | None = None
    ) -> None:
        """Creates a ring and publishes `model`, or opens the ring of `descriptor`.

        model: has the same shapes in every process. size: number of versions in the ring.
        """
        if not 2 <= size < _HEADER // 8:
            raise ValueError(f"a ring has 2 to {_HEADER // 8 - 1} places, got {size}")
        self.size = size
        self._shapes = {name: _layout(tensor) for name, tensor in model.state_dict().items()}
        self._stride = sum(aligned(bytes_) for _, _, bytes_ in self._shapes.values())
        self._file = SharedFile(_HEADER + size * max(self._stride, 1), descriptor)
        self._versions = np.frombuffer(self._file.bytes, np.int64, count=size + 1)
        self._places = [self._tensors(place) for place in range(size)]
        self.on_publish: Callable[[int], None] = lambda version: None
        if descriptor is None:
            self._versions[1:] = _NOTHING
            self.publish(model, version)

    @property
    def descriptor(self) -> int:
        """The file descriptor by which another process opens the same ring."""
        return self._file.descriptor

    @property
    def version(self) -> int:
        """Newest published version."""
        return int(self._versions[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of all places of the ring."""
        return self.size * self._stride

    def state_of(self, version: int) -> dict[str, Tensor]:
        """Returns the state_dict in a version's place, as views of the memory.

        For the process that publishes, whose threads no lock keeps apart: the place is written
        again for version + size. What was read is of this version if `holds` says so afterwards.
        """
        return self._places[version % self.size]

    def holds(self, version: int) -> bool:
        """Returns whether a version's place still has its weights, whole."""
        return int(self._versions[1 + version % self.size]) == version

    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as the newest version."""
        self._publish(model, version, fcntl.LOCK_EX)

    def publish_if_free(self, model: nn.Module, version: int) -> bool:
        """Publishes the weights unless somebody still reads the version in their place, however
        long; returns whether they are published. The next version has another place.
        """
        try:
            self._publish(model, version, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # systems differ
            return False
        return True

    @torch.no_grad()
    def _publish(self, model: nn.Module, version: int, how: int) -> None:
        place = version % self.size
        with self._locked(place, how):
            self._versions[1 + place] = _NOTHING
            for name, tensor in model.state_dict().items():
                self._places[place][name].copy_(tensor)
            self._versions[1 + place] = version
        self._versions[0] = version
        self.on_publish(version)

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the wanted version, or the newest, into `replica`; returns that version.

        held: the version that `replica` holds, which is not loaded again; None: unknown. Raises
        LookupError if the wanted version is not in the ring.
        """
        while True:
            version = self.version if wanted is None else wanted
            if version == held:
                return version
            if self._load(replica, version):
                return version
            if wanted is not None:
                raise LookupError(
                    f"version {wanted} is not among the {self.size} versions up to {self.version}"
                )

    def _load(self, replica: nn.Module, version: int) -> bool:
        """Loads a version; returns false if a newer one has taken its place."""
        place = version % self.size
        with self._locked(place, fcntl.LOCK_SH):
            if self._versions[1 + place] != version:
                return False
            replica.load_state_dict(self._places[place])
        return True

    @contextmanager
    def _locked(self, place: int, kind: int) -> Iterator[None]:
        fcntl.lockf(self.descriptor, kind, 1, place, os.SEEK_SET)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, place, os.SEEK_SET)

    def _tensors(self, place: int) -> dict[str, Tensor]:
        """Returns the state_dict in a place, as views of the memory."""
        offset, tensors = _HEADER + place * self._stride, {}
        for name, (dtype, shape, bytes_) in self._shapes.items():
            flat = torch.frombuffer(
                self._file.bytes, dtype=dtype, count=max(shape.numel(), 1), offset=offset
            )
            tensors[name] = flat[: shape.numel()].view(shape)
            offset += aligned(bytes_)
        return tensors


def _layout(tensor: Tensor) -> tuple[torch.dtype, torch.Size, int]:
    return tensor.dtype, tensor.shape, max(tensor.numel(), 1) * tensor.element_size()
