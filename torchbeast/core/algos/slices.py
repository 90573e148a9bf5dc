# SPDX-License-Identifier: Apache-2.0
"""Learning from some columns of a batch at a time, in several threads.

    batch [T+1, B] -- split --> [T+1, b] [T+1, b] ... --> whichever thread is free --> .grad, summed

Losses add up over columns, so the gradients of the slices add up to those of the whole, and nothing
is computed twice. What a slice needs stays in the cache of the core that learns it. And threads
meet once a batch: those inside of an operation meet after every one, which is expensive where other
processes want the same cores.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.storages.batch import Batch

# About what a row's activations take. Measured with an LSTM of 17 MB: slices of 4 columns take 1.4
# times as long as all 32, slices of 8 the same.
_RECURRENT_BYTES_A_COLUMN = 2_000_000
# Observations of 42 Atari rows. With the shallow network half of them take 0.75 times as long.
_WORTH_A_THREAD = 42 * 4 * 84 * 84

Figures = dict[str, Tensor]
Learn = Callable[[Any], Figures]  # of a slice: adds its gradients to the parameters
_Work = tuple[Callable[[], list[Figures]], Future[list[Figures]]]


class Slices:
    """How a model's batches are cut, and the threads that learn the slices.

    Used by one thread at a time, which does its share. With several, gradients are added in no
    certain order: the last digits vary.
    """

    def __init__(self, model: nn.Module, bytes_at_once: int | None, num_threads: int) -> None:
        """bytes_at_once: of the observations of a slice; None: the whole batch is one slice."""
        self._model = model
        self._bytes_at_once = bytes_at_once
        self._num_threads = num_threads
        self._helpers = _Helpers(num_threads - 1)

    def split(self, batch: Batch) -> Sequence[Batch]:
        """Slices that fit the cache, or smaller ones where that occupies more threads."""
        size = batch.batch_size, batch.column_bytes
        return batch.split(
            columns_of_a_slice(self._model, size, self._bytes_at_once, self._num_threads)
        )

    def backward(self, batch: Batch, learn: Learn) -> Figures:
        """Adds the gradients of all slices to the parameters; sums of what `learn` returned.

        An error of any thread is raised when all have ended.
        """
        slices = self.split(batch)
        left = iter(slices)  # gives each slice to one thread
        count = min(self._num_threads, len(slices)) - 1
        helped = [self._helpers.begin(lambda: _learn(left, learn)) for _ in range(count)]
        try:
            learnt = _learn(left, learn)
        finally:
            wait(helped)
        return _sums([*learnt, *(figures for share in helped for figures in share.result())])


def columns_of_a_slice(
    model: nn.Module, size: tuple[int, int], bytes_at_once: int | None, num_threads: int
) -> int:
    """The most columns in a slice of a batch; `size`: its columns, and bytes of observations in
    each.
    """
    columns, column_bytes = size[0], max(1, size[1])
    if bytes_at_once is None:
        return columns
    a_share = -(-columns // num_threads)
    wanted = min(bytes_at_once // column_bytes, max(a_share, _WORTH_A_THREAD // column_bytes))
    return max(least_columns(model), wanted)


def least_columns(model: nn.Module) -> int:
    """Columns of the narrowest slice worth learning from.

    A recurrent layer reads its weights anew in every row; that has to pay for many columns where it
    is large.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
    weights: int = sum(p.nbytes for layer in layers for p in layer.parameters())
    return 1 + weights // _RECURRENT_BYTES_A_COLUMN


def _learn(slices: Iterator[Batch], learn: Learn) -> list[Figures]:
    """One thread's share. Two may add to a parameter's gradient at once: autograd locks it."""
    return [learn(columns) for columns in slices]


def _sums(learnt: list[Figures]) -> Figures:
    """By name, over the slices."""
    return {name: torch.stack([figures[name] for figures in learnt]).sum() for name in learnt[0]}


class _Helpers:
    """Threads that wait for work until this object is dropped. Daemons: one that never comes back
    does not keep the process.
    """

    def __init__(self, count: int) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        for i in range(count):
            thread = threading.Thread(target=_help, args=(self._work,), daemon=True)
            thread.name = f"slices-{i}"
            thread.start()
        weakref.finalize(self, _end, self._work, count)

    def begin(self, share: Callable[[], list[Figures]]) -> Future[list[Figures]]:
        """Its result comes from whichever thread is free first."""
        learnt: Future[list[Figures]] = Future()
        self._work.put((share, learnt))
        return learnt


def _help(work: SimpleQueue[_Work | None]) -> None:
    while (item := work.get()) is not None:
        share, learnt = item
        try:
            learnt.set_result(share())
        except BaseException as error:  # raised again in the thread that asked
            learnt.set_exception(error)
        del item, share, learnt  # nothing of a batch is kept while this waits


def _end(work: SimpleQueue[_Work | None], count: int) -> None:
    for _ in range(count):
        work.put(None)
