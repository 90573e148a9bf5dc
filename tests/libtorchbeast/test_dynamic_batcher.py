# SPDX-License-Identifier: Apache-2.0
"""DynamicBatcher: every caller gets its own slice, or an exception with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from background import Background, wait_for

from libtorchbeast import AsyncError, Batch, ClosedBatchingQueue, DynamicBatcher, NestError

ENDINGS = 50  # how often an ending is tried whose threads may meet in either order

ENQUEUE_CLOSED = "Enqueue to closed queue"
CLOSED_DURING = "Batching queue closed during compute"
DROPPED = "The associated promise has been destructed prior to the associated state becoming ready."


def row(*values: float) -> torch.Tensor:
    """Returns inputs [1, len(values)]."""
    return torch.tensor([values], dtype=torch.float32)


def callers(batcher: DynamicBatcher, *inputs: Any) -> list[Background[Any]]:
    """Starts one caller for each of the inputs, in this order."""
    started: list[Background[Any]] = []
    for one in inputs:
        started.append(Background(batcher.compute, one))
        wait_for(lambda: batcher.size() == len(started))
    return started


def answering(batcher: DynamicBatcher, function: Callable[[Any], Any]) -> Background[None]:
    """Starts a thread that answers every batch with function(inputs)."""

    def loop() -> None:
        for batch in batcher:
            batch.set_outputs(function(batch.get_inputs()))

    return Background(loop)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"minimum_batch_size": 0}, "Min batch size must be >= 1"),
        ({"minimum_batch_size": -1, "maximum_batch_size": -2}, "Min batch size must be >= 1"),
        (
            {"minimum_batch_size": 5, "maximum_batch_size": 4},
            "Max batch size must be >= min batch size",
        ),
    ],
)
def test_impossible_sizes_are_refused_the_minimum_first(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError) as failure:
        DynamicBatcher(**sizes)
    assert str(failure.value) == text


def test_arguments_may_be_positional() -> None:
    assert DynamicBatcher(0, 1, 2, None, True).size() == 0


class TestCompute:
    def test_every_caller_gets_its_slice(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=3, timeout_ms=None)
        waiting = callers(batcher, row(1), row(2, 3), row(4))
        batch = next(batcher)
        assert isinstance(batch, Batch)
        assert batch.get_inputs().tolist() == [[1, 2, 3, 4]]
        batch.set_outputs((batch.get_inputs() * 10, {"negative": -batch.get_inputs()}))
        results = [caller.result() for caller in waiting]
        assert [result[0].tolist() for result in results] == [[[10]], [[20, 30]], [[40]]]
        assert [r[1]["negative"].tolist() for r in results] == [[[-1]], [[-2, -3]], [[-4]]]

    def test_outputs_are_sliced_along_the_batch_dimension_whatever_their_shape(self) -> None:
        batcher = DynamicBatcher(batch_dim=1, minimum_batch_size=2, timeout_ms=None)
        first, second = callers(batcher, row(1), row(2, 3))
        outputs = torch.arange(4 * 3 * 2).reshape(4, 3, 2)
        next(batcher).set_outputs(outputs)
        assert torch.equal(first.result(), outputs[:, :1])
        assert torch.equal(second.result(), outputs[:, 1:])

    def test_the_batch_dimension_may_be_the_first(self) -> None:
        batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=None)
        first, second = callers(batcher, torch.ones(2, 3), torch.zeros(1, 3))
        batch = next(batcher)
        assert batch.get_inputs().shape == (3, 3)
        batch.set_outputs(batch.get_inputs().sum(1))
        assert first.result().tolist() == [3, 3] and second.result().tolist() == [0]

    @pytest.mark.parametrize(
        "outputs", [(), [], {}, ((), {"a": ()})], ids=["tuple", "list", "dict", "nested"]
    )
    def test_an_answer_may_have_no_leaf(self, outputs: Any) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, row(1))
        next(batcher).set_outputs(outputs)
        expected = () if outputs == [] else outputs
        assert caller.result() == expected

    def test_an_empty_part_of_an_answer_is_kept(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, (row(1), ()))
        batch = next(batcher)
        assert batch.get_inputs()[1] == ()
        batch.set_outputs(((row(7),), ()))
        ((action,), state) = caller.result()
        assert action.tolist() == [[7]] and state == ()

    @pytest.mark.parametrize("bad", [(), {"a": []}], ids=str)
    def test_inputs_without_a_leaf_are_refused(self, bad: Any) -> None:
        with pytest.raises(ValueError, match="^Cannot enqueue empty vector of tensors$"):
            DynamicBatcher().compute(bad)

    def test_inputs_without_a_batch_dimension_are_refused(self) -> None:
        with pytest.raises(ValueError) as failure:
            DynamicBatcher(batch_dim=2).compute(torch.ones(1, 1))
        assert str(failure.value) == (
            "Enqueued tensors must have more than batch_dim == 2 dimensions, but got 2"
        )

    @pytest.mark.parametrize("bad", [(), torch.ones(1)], ids=["no leaf", "no dimension"])
    def test_the_checks_come_before_the_closed_check(self, bad: Any) -> None:
        batcher = DynamicBatcher()
        batcher.close()
        with pytest.raises(ValueError):
            batcher.compute(bad)

    def test_inputs_of_different_batch_sizes_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"dimension 1: expected 2, got 1"):
            DynamicBatcher().compute((row(1, 2), row(1)))

    def test_inputs_unlike_the_others_fail_their_own_caller_only(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        [first] = callers(batcher, (row(1), row(1)))
        with pytest.raises(NestError, match="Expected vectors of same length but got 2 vs 1"):
            batcher.compute((row(1),))
        with pytest.raises(ValueError, match=r"float32\[1, \*\].*got float64\[1, 1\]"):
            batcher.compute((row(1), row(1).double()))
        second = Background(batcher.compute, (row(2), row(2)))
        batch = next(batcher)
        batch.set_outputs(batch.get_inputs())
        assert first.result()[0].tolist() == [[1]] and second.result()[0].tolist() == [[2]]

    def test_a_closed_batcher_takes_nothing(self) -> None:
        batcher = DynamicBatcher()
        batcher.close()
        with pytest.raises(ClosedBatchingQueue) as failure:
            batcher.compute(row(1))
        assert str(failure.value) == ENQUEUE_CLOSED

    def test_a_dropped_batch_raises_in_every_caller(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        waiting = callers(batcher, row(1), row(2))
        batch = next(batcher)
        del batch
        for caller in waiting:
            with pytest.raises(AsyncError) as failure:
                caller.result()
            assert str(failure.value) == DROPPED
            assert isinstance(failure.value, RuntimeError)

    def test_a_batch_is_dropped_with_the_exception_that_holds_it(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, row(1))

        def answer_once() -> None:
            try:
                for batch in batcher:
                    raise KeyError(f"no model for {batch}")
            except KeyError:
                return  # and with this frame the last reference to the batch goes

        Background(answer_once).result()
        with pytest.raises(AsyncError):
            caller.result()

    def test_waiting_does_not_block_the_interpreter(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        waiting = callers(batcher, row(1))  # waits for its size in Python
        waiting += [Background(batcher.compute, row(2))]
        batch = next(batcher)
        batch.set_outputs(batch.get_inputs())
        assert [caller.result().item() for caller in waiting] == [1, 2]

    def test_many_callers_and_inference_threads_never_mix_up_slices(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, maximum_batch_size=5, timeout_ms=1)
        answerers = [answering(batcher, lambda inputs: (inputs * 2, ())) for _ in range(2)]

        def call(caller: int) -> None:
            for number in range(200):
                value = 1000.0 * caller + number
                inputs = row(*[value] * (1 + number % 3))
                doubled, state = batcher.compute(inputs)
                assert torch.equal(doubled, inputs * 2) and state == ()

        for caller in [Background(call, number) for number in range(6)]:
            caller.result()
        batcher.close()
        for answerer in answerers:
            answerer.result()


class TestIteration:
    def test_the_maximum_counts_callers(self) -> None:
        batcher = DynamicBatcher(maximum_batch_size=2)
        waiting = callers(batcher, row(1, 1), row(2), row(3))
        assert next(batcher).get_inputs().tolist() == [[1, 1, 2]]
        last = next(batcher)
        assert last.get_inputs().tolist() == [[3]]
        last.set_outputs(())
        assert waiting[2].result() == ()
        for caller in waiting[:2]:
            with pytest.raises(AsyncError):
                caller.result()

    def test_without_a_timeout_it_waits_for_the_minimum(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        answerer = Background(next, batcher)
        waiting = callers(batcher, row(1))
        answerer.wait_until_blocked()
        waiting.append(Background(batcher.compute, row(2)))
        batch = answerer.result()
        batch.set_outputs(())
        assert [caller.result() for caller in waiting] == [(), ()]

    def test_with_a_timeout_one_caller_is_enough(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=1)
        caller = Background(batcher.compute, row(1))
        next(batcher).set_outputs(())
        assert caller.result() == ()

    def test_a_closed_batcher_yields_nothing(self) -> None:
        batcher = DynamicBatcher()
        batcher.close()
        assert list(batcher) == []


class TestBatch:
    @pytest.fixture
    def served(self) -> tuple[Batch, list[Background[Any]]]:
        """Returns a batch of three rows from two callers."""
        batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
        waiting = callers(batcher, row(1), row(2, 3))
        return next(batcher), waiting

    def test_get_inputs_is_repeatable(self, served: Any) -> None:
        batch, _ = served
        assert torch.equal(batch.get_inputs(), batch.get_inputs())
        batch.set_outputs(())
        assert batch.get_inputs().tolist() == [[1, 2, 3]]

    def test_outputs_with_too_few_dimensions_are_refused(self, served: Any) -> None:
        batch, _ = served
        with pytest.raises(ValueError) as failure:
            batch.set_outputs(torch.zeros(3))
        assert str(failure.value) == (
            "With batch dimension 1, output shape must have at least 2 dimensions, but got [3]"
        )

    def test_outputs_of_another_batch_size_are_refused(self, served: Any) -> None:
        batch, _ = served
        with pytest.raises(ValueError) as failure:
            batch.set_outputs((torch.zeros(3, 3), torch.zeros(3, 2)))
        assert str(failure.value) == (
            "Output shape must have the same batch dimension as the input batch size. "
            "Expected: 3. Observed: 2"
        )

    def test_a_refused_answer_can_be_followed_by_a_right_one(self, served: Any) -> None:
        batch, waiting = served
        for wrong in (torch.zeros(3), torch.zeros(1, 2), "no tensor", torch.zeros(1, 4)):
            with pytest.raises((ValueError, TypeError)):
                batch.set_outputs(wrong)
        assert not any(caller.ended for caller in waiting)
        batch.set_outputs(batch.get_inputs() + 1)
        assert [caller.result().tolist() for caller in waiting] == [[[2]], [[3, 4]]]

    def test_a_second_answer_is_an_error(self, served: Any) -> None:
        batch, waiting = served
        batch.set_outputs(())
        for outputs in ((), torch.zeros(3)):
            with pytest.raises(RuntimeError) as failure:
                batch.set_outputs(outputs)
            assert str(failure.value) == "set_outputs called twice"
        assert [caller.result() for caller in waiting] == [(), ()]

    def test_without_check_outputs_a_wrong_answer_fails_its_callers(self) -> None:
        too_small = [torch.zeros(shape) for shape in ((), (3,), (1, 0), (1, 2), (2, 2), (2, 0, 5))]
        for wrong in too_small:
            batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None, check_outputs=False)
            _, second = callers(batcher, row(1), row(2, 3))
            next(batcher).set_outputs(wrong)
            with pytest.raises((ValueError, IndexError)):
                second.result()

    def test_a_version_may_be_given_with_the_answer(self, served: Any) -> None:
        batch, waiting = served
        batch.set_outputs((), version=7)
        assert [caller.result() for caller in waiting] == [(), ()]


class TestClose:
    def test_a_second_close_is_an_error(self) -> None:
        batcher = DynamicBatcher()
        assert batcher.is_closed() is False
        batcher.close()
        assert batcher.is_closed() is True
        with pytest.raises(RuntimeError, match="^Queue was closed already$"):
            batcher.close()

    def test_close_raises_in_callers_without_an_answer(self) -> None:
        batcher = DynamicBatcher(minimum_batch_size=4, timeout_ms=None)
        waiting = callers(batcher, row(1), row(2), row(3))
        batcher.close()
        for caller in waiting:
            with pytest.raises(ClosedBatchingQueue) as failure:
                caller.result()
            assert str(failure.value) == CLOSED_DURING

    def test_close_is_safe_at_any_moment_of_compute(self) -> None:
        for _ in range(ENDINGS):
            batcher = DynamicBatcher(minimum_batch_size=4, timeout_ms=None)
            waiting = [Background(batcher.compute, row(1)) for _ in range(3)]
            batcher.close()
            for caller in waiting:
                with pytest.raises(ClosedBatchingQueue) as failure:
                    caller.result()
                assert str(failure.value) in (ENQUEUE_CLOSED, CLOSED_DURING)

    def test_close_wakes_every_inference_thread(self) -> None:
        batcher = DynamicBatcher(timeout_ms=None)
        answerers = [Background(list, batcher) for _ in range(3)]
        for answerer in answerers:
            answerer.wait_until_blocked()
        batcher.close()
        assert [answerer.result() for answerer in answerers] == [[], [], []]

    def test_a_batch_handed_out_before_close_may_still_be_answered(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, row(1))
        batch = next(batcher)
        batcher.close()
        assert not caller.ended
        batch.set_outputs(row(2))
        assert caller.result().item() == 2

    def test_a_batch_dropped_after_close_raises_that_it_was_closed(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, row(1))
        batch = next(batcher)
        batcher.close()
        del batch
        with pytest.raises(ClosedBatchingQueue) as failure:
            caller.result()
        assert str(failure.value) == CLOSED_DURING

    def test_inputs_given_while_an_inference_thread_waits_are_not_lost_at_close(self) -> None:
        for _ in range(ENDINGS):
            batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
            answerer = answering(batcher, lambda inputs: inputs + 1)
            answerer.wait_until_blocked()
            [caller] = callers(batcher, row(1))
            batcher.close()
            assert caller.result().item() == 2
            answerer.result()

    def test_a_batch_outlives_its_batcher(self) -> None:
        batcher = DynamicBatcher()
        caller = Background(batcher.compute, row(1))
        batch = next(batcher)
        del batcher
        batch.set_outputs(np.zeros((1, 1)))
        assert caller.result().item() == 0


def test_the_repr_has_the_number_of_waiting_callers() -> None:
    batcher = DynamicBatcher(minimum_batch_size=2, timeout_ms=None)
    callers(batcher, row(1))
    assert repr(batcher) == "<DynamicBatcher 1 computations waiting>"
    batcher.close()
    assert "closed" in repr(batcher)
