# SPDX-License-Identifier: Apache-2.0
"""Leaves passed into the core and out of it: which are accepted, copied and shared.

They pass through a BatchingQueue, or through a DynamicBatcher where the names say so.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from background import Background

from libtorchbeast import BatchingQueue, DynamicBatcher, NestError

DTYPES = {
    "bool": torch.bool,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "uint16": torch.uint16,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def through(*leaves: Any, batch_dim: int = 0) -> torch.Tensor:
    """The leaves, joined by a queue."""
    queue = BatchingQueue(batch_dim=batch_dim, minimum_batch_size=len(leaves))
    for leaf in leaves:
        queue.enqueue(leaf)
    return next(queue)


@pytest.mark.parametrize("dtype", DTYPES)
class TestEveryDtype:
    def test_every_dtype_of_numpy_comes_out_as_torchs(self, dtype: str) -> None:
        leaf = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
        out = through(leaf, leaf)
        assert out.dtype is DTYPES[dtype]
        np.testing.assert_array_equal(out.numpy(), np.concatenate([leaf, leaf]))

    def test_every_dtype_of_torch_comes_out_unchanged(self, dtype: str) -> None:
        leaf = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(DTYPES[dtype])
        out = through(leaf)
        assert out.dtype is leaf.dtype and torch.equal(out, leaf)

    def test_every_dtype_keeps_its_extreme_values(self, dtype: str) -> None:
        if dtype == "bool":
            leaf = np.array([False, True])
        else:
            limits = np.finfo(dtype) if "float" in dtype else np.iinfo(dtype)
            leaf = np.array([limits.min, limits.max], dtype)
        np.testing.assert_array_equal(through(leaf).numpy(), leaf)


@pytest.mark.parametrize("name", ["int_", "longlong", "intc", "ulonglong", "double", "bool_"])
def test_numpys_other_names_for_a_dtype_are_that_dtype(name: str) -> None:
    leaf = np.ones(3, getattr(np, name))
    np.testing.assert_array_equal(through(leaf).numpy(), leaf)


@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(24).reshape(4, 6)[1:3, ::2],
        np.arange(6)[::-1],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.zeros((3, 0, 2)),
    ],
    ids=["transposed", "fortran", "sliced", "reversed", "broadcast", "empty"],
)
def test_arrays_of_any_layout_are_taken(leaf: np.ndarray) -> None:
    np.testing.assert_array_equal(through(leaf).numpy(), leaf)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24).reshape(4, 6)[1:3, ::2],
        torch.arange(3).expand(4, 3),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["permuted", "sliced", "expanded", "parameter", "with a graph"],
)
def test_tensors_of_any_layout_are_taken_without_their_graph(leaf: torch.Tensor) -> None:
    out = through(leaf)
    assert torch.equal(out, leaf.detach()) and not out.requires_grad


def test_a_read_only_array_is_taken_and_comes_out_writable() -> None:
    leaf = np.ones(3)
    leaf.flags.writeable = False
    out = through(leaf)
    out += 1
    assert out.tolist() == [2, 2, 2] and leaf.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (np.array([object()]), "object"),
        (np.array([1], ">i4"), ">i4"),
        (np.array([1], np.dtype("f8").newbyteorder()), ">f8"),
        (np.array([1j]), "complex128"),
        (np.array(["a"]), "<U1"),
        (np.array([b"a"]), r"\|S1"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (np.zeros(1, [("x", "i4"), ("y", "f4")]), "x"),
        (np.array([1], np.longdouble), "float128|longdouble"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_arrays_are_refused_by_their_dtype(leaf: np.ndarray, got: str) -> None:
    with pytest.raises(ValueError, match=f"native byte order, got .*({got})"):
        BatchingQueue(batch_dim=0).enqueue(leaf)


@pytest.mark.parametrize(
    "leaf", [None, 1, 1.0, "text", b"bytes", {1}, range(3), np.float32(1)], ids=repr
)
def test_other_leaves_are_refused_by_their_type(leaf: Any) -> None:
    with pytest.raises(TypeError, match="expected torch.Tensor or numpy.ndarray, got"):
        BatchingQueue(batch_dim=0).enqueue({"a": leaf})


def test_an_array_whose_copy_no_memory_holds_is_a_memory_error() -> None:
    leaf = np.broadcast_to(np.uint8(1), (2**60,))
    with pytest.raises(MemoryError):
        BatchingQueue(batch_dim=0).enqueue(leaf)


def test_a_tensor_elsewhere_than_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a tensor on the CPU, got one on meta"):
        BatchingQueue(batch_dim=0).enqueue(torch.zeros(2, device="meta"))


@pytest.mark.parametrize(
    "leaf", [torch.zeros(2, dtype=torch.bfloat16), torch.eye(2).to_sparse()], ids=["bf16", "sparse"]
)
def test_tensors_that_numpy_does_not_know_are_refused(leaf: torch.Tensor) -> None:
    with pytest.raises((TypeError, ValueError)):
        BatchingQueue(batch_dim=0).enqueue(leaf)


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises((NestError, TypeError), match="int"):
        BatchingQueue(batch_dim=0).enqueue({1: torch.zeros(2)})


def test_nests_that_contain_themselves_are_refused() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(NestError):
        BatchingQueue(batch_dim=0).enqueue(cyclic)


class TestCopies:
    @pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
    def test_inputs_may_be_written_after_the_call(self, make: Any) -> None:
        leaf = make((1, 2))
        queue = BatchingQueue()
        queue.enqueue(leaf)
        leaf[...] = 7
        assert next(queue).tolist() == [[1, 1]]

    def test_writing_to_outputs_does_not_change_inputs(self) -> None:
        leaf = torch.ones(1, 2)
        through(leaf).fill_(7)
        assert leaf.tolist() == [[1, 1]]

    def test_an_answer_may_be_written_afterwards(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, torch.zeros(1, 1))
        outputs = torch.ones(1, 1)
        next(batcher).set_outputs(outputs)
        outputs.fill_(7)
        assert caller.result().item() == 1

    def test_two_callers_answers_do_not_overlap(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        callers = [Background(batcher.compute, torch.zeros(1, 1)) for _ in range(2)]
        next(batcher).set_outputs(torch.ones(1, 2))
        first, second = (caller.result() for caller in callers)
        first.fill_(7)
        assert second.item() == 1


class TestSharing:
    def test_two_views_of_a_batch_are_one_memory(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, torch.zeros(1, 1))
        batch = next(batcher)
        first, second = batch.get_inputs(), batch.get_inputs()
        assert first.data_ptr() == second.data_ptr(), "inputs are copied where they need not be"
        batch.set_outputs(())
        caller.result()

    def test_contiguous_slices_are_not_copied_for_their_callers(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        callers = [Background(batcher.compute, torch.zeros(1, 1)) for _ in range(2)]
        next(batcher).set_outputs(torch.zeros(1, 2))
        addresses = sorted(caller.result().data_ptr() for caller in callers)
        assert addresses[1] - addresses[0] == 4

    def test_a_tensor_keeps_its_memory_when_the_queue_and_the_batch_are_gone(self) -> None:
        big = through(torch.full((64, 1024), 3.0))
        kept = big[5]
        del big
        gc.collect()
        for _ in range(8):  # would take the memory if it were free
            through(torch.zeros(64, 1024))
        assert (kept == 3).all()

    def test_tensors_are_aligned_to_a_cache_line(self) -> None:
        assert all(through(torch.zeros(3, 5)).data_ptr() % 64 == 0 for _ in range(20))


class TestReferences:
    def test_the_core_keeps_no_reference_to_inputs(self) -> None:
        class Tracked(np.ndarray):
            pass

        leaf = np.zeros((1, 1)).view(Tracked)
        nest = [leaf]
        alive = weakref.ref(leaf)
        queue = BatchingQueue()
        before = sys.getrefcount(nest)
        queue.enqueue(nest)
        assert sys.getrefcount(nest) == before
        del leaf, nest
        assert alive() is None

    def test_outputs_have_a_single_owner(self) -> None:
        out = through(torch.zeros(1, 1))
        alive = weakref.ref(out)
        del out
        assert alive() is None

    def test_the_core_keeps_no_reference_to_a_refused_nest(self) -> None:
        class Leaf:
            pass

        leaf = Leaf()
        before = sys.getrefcount(leaf)
        with pytest.raises(TypeError):
            BatchingQueue().enqueue({"good": np.zeros((1, 1)), "bad": leaf})
        gc.collect()
        assert sys.getrefcount(leaf) == before
