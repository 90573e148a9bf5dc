# SPDX-License-Identifier: Apache-2.0
"""Learning from slices of a batch, some columns at a time, in several threads.

    batch [T+1, B] -- split --> [T+1, b] [T+1, b] ... --> whichever thread is free --> .grad, summed

Losses add up over columns, so the gradients of the slices add up to the whole batch's, and
nothing is computed twice. The activations of a slice stay in the cache of the core that computes
them. Threads synchronise once per batch; threads inside operations synchronise after every
operation, which is expensive where other processes compete for the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.storages.batch import Batch, Feedback, joined

# About the size of a row's activations. Measured with an LSTM of 17 MB: slices of 4 columns take
# 1.2 to 1.4 times as long as all 32 at once, slices of 8 the same time.
_RECURRENT_BYTES_A_COLUMN = 2_000_000
# Observations of 42 Atari rows. With the shallow network half of them take 0.75 times as long.
WORTH_A_THREAD = 42 * 4 * 84 * 84

Figures = dict[str, Tensor]
_Learnt = tuple[Figures, Feedback]
Learn = Callable[[Any], _Learnt]  # learns from a slice: adds its gradients to the parameters


class Slices:
    """Splits a model's batches into slices and learns from them in several threads.

    Used by one thread at a time, which does its share. With several threads gradients are added in
    no fixed order, so the last digits vary.
    """

    def __init__(self, model: nn.Module, bytes_at_once: int | None, num_threads: int) -> None:
        """Prepares the threads, which end once this object is gone.

        bytes_at_once: bytes of observations in a slice; None: the whole batch is one slice.
        """
        self._model = model
        self._bytes_at_once = bytes_at_once
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "slices")

    def split(self, batch: Batch) -> Sequence[Batch]:
        """Returns slices that fit the cache, or smaller ones to occupy more threads."""
        size = batch.batch_size, batch.column_bytes
        return batch.split(
            columns_of_a_slice(self._model, size, self._bytes_at_once, self._num_threads)
        )

    def backward(self, batch: Batch, learn: Learn) -> _Learnt:
        """Adds the gradients of all slices to the parameters; returns sums of the figures, and the
        feedback of all columns.

        An error in any thread is raised after all have ended.
        """
        slices = self.split(batch)
        left = iter(enumerate(slices))  # gives each slice to one thread
        learnt: dict[int, _Learnt] = {}
        threads = torch.get_num_threads()

        def share() -> None:
            for number, columns in left:  # autograd locks gradients that threads share
                learnt[number] = learn(columns)

        def help_out() -> None:
            torch.set_num_threads(threads)  # as in the thread that waits for the result
            share()

        count = min(self._num_threads, len(slices)) - 1
        helped = [self._helpers.submit(help_out) for _ in range(count)]
        try:
            share()
        finally:
            wait(helped)
        for helper in helped:
            helper.result()
        figures, feedback = zip(*(learnt[number] for number in range(len(slices))), strict=True)
        sums = {n: torch.stack([each[n] for each in figures]).sum() for n in figures[0]}
        return sums, joined(feedback, batch.batch_size)


def columns_of_a_slice(
    model: nn.Module, size: tuple[int, int], bytes_at_once: int | None, num_threads: int
) -> int:
    """Returns the most columns in a slice; size: columns of the batch, and bytes of each.

    A small batch is divided even where a recurrent layer then gets only half the columns that it
    should: threads inside operations spin while actors have their cores, which costs more.
    """
    columns, column_bytes = size[0], max(1, size[1])
    if bytes_at_once is None:
        return columns
    a_share = -(-columns // num_threads)
    wanted = min(bytes_at_once // column_bytes, max(a_share, WORTH_A_THREAD // column_bytes))
    least = least_columns(model)
    return max(wanted, min(least, a_share), least // 2)


def least_columns(model: nn.Module) -> int:
    """Returns the number of columns in the smallest efficient slice.

    A recurrent layer reads its weights again for every row, so large ones need many columns.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
    weights: int = sum(p.nbytes for layer in layers for p in layer.parameters())
    return 1 + weights // _RECURRENT_BYTES_A_COLUMN
