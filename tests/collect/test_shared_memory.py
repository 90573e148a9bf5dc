# SPDX-License-Identifier: Apache-2.0
"""Nests of arrays in an anonymous file."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from torchbeast.collect.shared_memory import SharedFile, arrays_at, slot_size
from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.spaces import ArraySpec

SPECS = {
    "a": ArraySpec((3, 5), "float32"),
    "b": (ArraySpec((), "int64"), ArraySpec((7,), "bool")),
    "empty": ArraySpec((0, 4), "uint8"),
    "z": ArraySpec((2,), "float16"),
}


def test_arrays_match_their_specs_and_share_no_cache_line() -> None:
    file = SharedFile(2 * slot_size(SPECS))
    leaves = [
        leaf
        for slot in range(2)
        for leaf in flatten(arrays_at(SPECS, file.bytes, slot * slot_size(SPECS)))
    ]
    for number, leaf in enumerate(leaves):
        assert leaf.ctypes.data % 64 == 0 or not leaf.size
        leaf[...] = number % 2 if leaf.dtype == bool else number
    for number, (leaf, spec) in enumerate(zip(leaves, 2 * flatten(SPECS), strict=True)):
        assert leaf.shape == spec.shape and leaf.dtype == spec.dtype
        assert (leaf == (number % 2 if leaf.dtype == bool else number)).all(), "none overlap"


def test_a_process_with_the_descriptor_sees_the_same_bytes() -> None:
    file = SharedFile(slot_size(SPECS))
    other = SharedFile(slot_size(SPECS), file.descriptor)
    mine, theirs = (arrays_at(SPECS, opened.bytes, 0) for opened in (file, other))
    mine["a"][1, 2] = 4.5
    theirs["b"][0][...] = -3
    assert theirs["a"][1, 2] == 4.5 and mine["b"][0] == -3


def test_a_new_file_is_zero_and_takes_no_memory_until_it_is_written() -> None:
    size = 2**32
    file = SharedFile(size)
    assert os.fstat(file.descriptor).st_size == size
    assert os.fstat(file.descriptor).st_blocks == 0
    file.bytes[size - 1] = 1
    assert 0 < os.fstat(file.descriptor).st_blocks * 512 <= 2**22
    assert file.bytes[0] == 0


def test_the_file_is_closed_with_its_owner_but_arrays_keep_the_memory() -> None:
    file = SharedFile(slot_size(SPECS))
    descriptor = file.descriptor
    array = arrays_at(SPECS, file.bytes, 0)["a"]
    borrowed = SharedFile(slot_size(SPECS), descriptor)
    del borrowed
    gc.collect()
    os.fstat(descriptor)  # a borrower leaves it open
    del file
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    array[...] = 2
    assert np.all(array == 2)


def test_the_file_cannot_be_resized_under_whoever_has_mapped_it() -> None:
    file = SharedFile(64)
    for size in (0, 128):
        with pytest.raises(PermissionError):
            os.ftruncate(file.descriptor, size)


def test_the_file_has_no_name_in_the_file_system() -> None:
    file = SharedFile(64)
    target = os.readlink(f"/proc/self/fd/{file.descriptor}")
    assert not os.path.exists(target)
