# SPDX-License-Identifier: Apache-2.0
"""The checks that rollouts and a replay fit the memory of a machine."""

from __future__ import annotations

from torchbeast.errors import UsageError

_MOST = 0.9  # of the free memory, so that something is left for the rest of the program


def check_memory(size: int, each: int, buffers: int, free: int | None) -> None:
    """Raises UsageError when so many steps of so many bytes do not fit, beside these bytes of
    buffers.
    """
    if free is None or size * each + buffers <= _MOST * free:
        return
    most = max(0, int(_MOST * free) - buffers) // each
    raise UsageError(
        f"--replay_size {size} needs {in_bytes(size * each)} of memory, {each:,} bytes a step, and "
        f"{in_bytes(buffers)} for other buffers, but {in_bytes(free)} are free on this machine: "
        f"give at most --replay_size {most}"
    )


def check_buffers(buffers: int, free: int | None) -> None:
    """Raises UsageError when the rollouts of a source, of so many bytes, do not fit."""
    if free is not None and buffers > free:
        raise UsageError(
            f"the rollouts that are written, wait and are learnt from take {in_bytes(buffers)} of "
            f"memory, but {in_bytes(free)} are free on this machine: give a smaller --batch_size, "
            "a smaller --unroll_length or fewer --num_actors"
        )


def in_bytes(count: float) -> str:
    """Formats a number of bytes as "7.1 GB", or "2.3 MB" where it is small."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
