# SPDX-License-Identifier: Apache-2.0
"""The gradients of a batch, some of its columns at a time, by several threads.

    batch [T+1, B] -- split --> [T+1, b] [T+1, b] ... --> whichever thread is free --> .grad, summed

Losses add up over columns, so the gradients of the pieces add up to those of the whole, and nothing
is computed twice. What a piece needs stays in the cache of the core that learns it. And threads
meet once a batch: those inside of an operation meet after every one, which is dear where other
processes want the same cores.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from torchbeast.core.nest_py import flatten
from torchbeast.core.storages.rollout import Rollout

# About what a row's activations take. Measured with an LSTM of 17 MB: pieces of 4 columns take 1.4
# times as long as all 32, pieces of 8 the same.
_RECURRENT_BYTES_A_COLUMN = 2_000_000
# Observations of 42 Atari rows. Half as many cost half as much again with the shallow network.
_WORTH_A_THREAD = 42 * 4 * 84 * 84

Losses = dict[str, Tensor]
LossesOf = Callable[[Rollout], Losses]
_Work = tuple[Callable[[], list[Losses]], Future[list[Losses]]]


class Pieces:
    """How a model's batches are cut, and the threads that learn the pieces.

    Used by one thread at a time, which does its share. With several, gradients are added in no
    certain order: the last digits vary.
    """

    def __init__(self, model: nn.Module, bytes_at_once: int | None, num_threads: int) -> None:
        """bytes_at_once: of the observations of a piece; None: the whole batch is one piece."""
        self._model = model
        self._bytes_at_once = bytes_at_once
        self._num_threads = num_threads
        self._helpers = _Helpers(num_threads - 1)

    def split(self, batch: Rollout) -> list[Rollout]:
        """Pieces that fit the cache, or smaller ones where that occupies more threads."""
        column: int = sum(leaf[:, 0].nbytes for leaf in flatten(batch.observation))
        size = batch.batch_size, column
        return batch.split(
            columns_of_a_piece(self._model, size, self._bytes_at_once, self._num_threads)
        )

    def backward(self, batch: Rollout, losses: LossesOf) -> Losses:
        """Adds the gradients of all pieces to the parameters.

        The sums of `losses`, detached, with their total_loss. An error of any thread is raised
        when all have ended.
        """
        pieces = self.split(batch)
        left = iter(pieces)  # gives each piece to one thread
        count = min(self._num_threads, len(pieces)) - 1
        helped = [self._helpers.begin(lambda: _backward(left, losses)) for _ in range(count)]
        try:
            learnt = _backward(left, losses)
        finally:
            wait(helped)
        return _sums([*learnt, *(parts for share in helped for parts in share.result())])


def columns_of_a_piece(
    model: nn.Module, size: tuple[int, int], bytes_at_once: int | None, num_threads: int
) -> int:
    """The most columns in a piece of a batch; `size`: its columns, and bytes of observations in
    each.
    """
    columns, column_bytes = size[0], max(1, size[1])
    if bytes_at_once is None:
        return columns
    a_share = -(-columns // num_threads)
    wanted = min(bytes_at_once // column_bytes, max(a_share, _WORTH_A_THREAD // column_bytes))
    return max(least_columns(model), wanted)


def least_columns(model: nn.Module) -> int:
    """Columns of the narrowest piece worth learning from.

    A recurrent layer reads its weights anew in every row; that has to pay for many columns where it
    is large.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
    weights: int = sum(p.nbytes for layer in layers for p in layer.parameters())
    return 1 + weights // _RECURRENT_BYTES_A_COLUMN


def _backward(pieces: Iterator[Rollout], losses: LossesOf) -> list[Losses]:
    """One thread's share. Two may add to a parameter's gradient at once: autograd locks it."""
    learnt: list[Losses] = []
    for piece in pieces:
        parts = losses(piece)
        parts["total_loss"] = torch.stack(list(parts.values())).sum()
        parts["total_loss"].backward()  # type: ignore[no-untyped-call]
        learnt.append({name: loss.detach() for name, loss in parts.items()})
    return learnt


def _sums(learnt: list[Losses]) -> Losses:
    """By name, over the pieces."""
    return {name: torch.stack([parts[name] for parts in learnt]).sum() for name in learnt[0]}


class _Helpers:
    """Threads that wait for work until this object is dropped. Daemons: one that never comes back
    does not keep the process.
    """

    def __init__(self, count: int) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        for i in range(count):
            thread = threading.Thread(target=_help, args=(self._work,), daemon=True)
            thread.name = f"pieces-{i}"
            thread.start()
        weakref.finalize(self, _end, self._work, count)

    def begin(self, share: Callable[[], list[Losses]]) -> Future[list[Losses]]:
        """Its result comes from whichever thread is free first."""
        learnt: Future[list[Losses]] = Future()
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
