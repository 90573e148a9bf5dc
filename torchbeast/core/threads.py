# SPDX-License-Identifier: Apache-2.0
"""The number of threads that torch's operations use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes each operation in one thread on the CPU; afterwards in as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
