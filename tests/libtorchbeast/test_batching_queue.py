# SPDX-License-Identifier: Apache-2.0
"""BatchingQueue: joining, refusing, waiting and closing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from background import SOON, Background, wait_for

from libtorchbeast import BatchingQueue, ClosedBatchingQueue, NestError

ENDINGS = 50  # how often an ending is tried whose threads may meet in either order


def item(value: float, columns: int = 1) -> torch.Tensor:
    """Returns a leaf [2, columns]."""
    return torch.full((2, columns), float(value))


def values(batch: torch.Tensor) -> list[float]:
    """Returns the first row of a batch of items."""
    return batch[0].tolist()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"minimum_batch_size": 0}, "Min batch size must be >= 1"),
        ({"minimum_batch_size": -1, "maximum_batch_size": -2}, "Min batch size must be >= 1"),
        (
            {"minimum_batch_size": 5, "maximum_batch_size": 4},
            "Max batch size must be >= min batch size",
        ),
        (
            {"minimum_batch_size": 5, "maximum_batch_size": 4, "maximum_queue_size": 3},
            "Max batch size must be >= min batch size",
        ),
        (
            {"maximum_batch_size": 4, "maximum_queue_size": 3},
            "Max queue size must be >= max batch size",
        ),
        ({"maximum_queue_size": 1023}, "Max queue size must be >= max batch size"),
        (
            {"minimum_batch_size": 0, "maximum_batch_size": 0, "maximum_queue_size": -1},
            "Min batch size must be >= 1",
        ),
    ],
)
def test_impossible_sizes_are_refused_the_minimum_first(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError) as failure:
        BatchingQueue(**sizes)
    assert str(failure.value) == text


def test_arguments_may_be_positional() -> None:
    queue = BatchingQueue(0, 1, 2, None, True, 2)
    queue.enqueue(item(1))
    assert next(queue).shape == (2, 1)


def test_a_negative_batch_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_dim must be >= 0, got -1"):
        BatchingQueue(batch_dim=-1)


class TestEnqueue:
    def test_a_leaf_without_a_batch_dimension_is_refused(self) -> None:
        queue = BatchingQueue(batch_dim=3)
        with pytest.raises(ValueError) as failure:
            queue.enqueue((torch.ones(2, 2, 2, 2), [torch.ones(5, 2)]))
        assert str(failure.value) == (
            "Enqueued tensors must have more than batch_dim == 3 dimensions, but got 2"
        )

    @pytest.mark.parametrize("empty", [(), [], {}, ((), {}), {"a": ()}], ids=str)
    def test_a_nest_without_a_leaf_is_refused(self, empty: Any) -> None:
        with pytest.raises(ValueError) as failure:
            BatchingQueue().enqueue(empty)
        assert str(failure.value) == "Cannot enqueue empty vector of tensors"

    @pytest.mark.parametrize("bad", [(), torch.ones(())], ids=["no leaf", "no dimension"])
    def test_the_checks_come_before_the_closed_check(self, bad: Any) -> None:
        queue = BatchingQueue()
        queue.close()
        with pytest.raises(ValueError):
            queue.enqueue(bad)

    def test_a_closed_queue_takes_nothing(self) -> None:
        queue = BatchingQueue()
        queue.close()
        with pytest.raises(ClosedBatchingQueue) as failure:
            queue.enqueue(item(0))
        assert str(failure.value) == "Enqueue to closed queue"
        assert isinstance(failure.value, RuntimeError)

    def test_without_check_inputs_any_leaf_is_taken(self) -> None:
        queue = BatchingQueue(check_inputs=False)
        queue.enqueue(torch.tensor(3))
        assert next(queue).item() == 3
        BatchingQueue(check_inputs=False).enqueue(())

    def test_a_full_queue_blocks_until_there_is_room(self) -> None:
        queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
        queue.enqueue(item(1))
        producer = Background(queue.enqueue, item(2))
        producer.wait_until_blocked()
        assert queue.size() == 1
        assert values(next(queue)) == [1]
        producer.result()
        assert values(next(queue)) == [2]

    def test_blocking_on_a_full_queue_does_not_block_the_interpreter(self) -> None:
        queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
        queue.enqueue(item(1))
        producers = [Background(queue.enqueue, item(2)) for _ in range(3)]
        for producer in producers:
            producer.wait_until_blocked()  # this line is Python, and runs
        queue.close()
        for producer in producers:
            with pytest.raises(ClosedBatchingQueue, match="^Enqueue to closed queue$"):
                producer.result()

    @pytest.mark.parametrize(
        ("bad", "text"),
        [
            ((item(0),), r"Expected vectors of same length but got 2 vs 1"),
            (item(0), "nests don't match"),
            ({"a": item(0)}, "nests don't match"),
            ((item(0), {"x": torch.zeros(2, 1, 4), "y": item(0)}), "Expected maps of same length"),
            ((item(0), {"z": torch.zeros(2, 1, 4)}), "Expected maps to have same keys"),
        ],
    )
    def test_another_structure_than_the_first_items_is_refused(self, bad: Any, text: str) -> None:
        queue = BatchingQueue()
        queue.enqueue((item(0), {"x": torch.zeros(2, 1, 4)}))
        with pytest.raises(NestError, match=text):
            queue.enqueue(bad)
        assert queue.size() == 1

    @pytest.mark.parametrize(
        ("bad", "got"),
        [
            (torch.zeros(2, 1, 5), r"float32\[2, 1, 5\]"),
            (torch.zeros(3, 1, 4), r"float32\[3, 1, 4\]"),
            (torch.zeros(2, 1), r"float32\[2, 1\]"),
            (torch.zeros(2, 1, 4, dtype=torch.float64), r"float64\[2, 1, 4\]"),
        ],
        ids=["last size", "first size", "fewer dimensions", "dtype"],
    )
    def test_another_leaf_than_the_first_items_is_refused_with_both_sides(
        self, bad: torch.Tensor, got: str
    ) -> None:
        queue = BatchingQueue()
        queue.enqueue(torch.zeros(2, 1, 4))
        with pytest.raises(ValueError, match=rf"float32\[2, \*, 4\].*but got {got}"):
            queue.enqueue(bad)

    def test_a_refusal_names_the_place_in_the_nest(self) -> None:
        queue = BatchingQueue()
        queue.enqueue({"obs": (item(0), item(0))})
        with pytest.raises(ValueError, match=r"at \['obs'\]\[1\]"):
            queue.enqueue({"obs": (item(0), (item(0),))})

    def test_a_refused_item_does_not_affect_later_batches(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2)
        queue.enqueue(item(1))
        with pytest.raises(ValueError):
            queue.enqueue(torch.zeros(3, 1))
        queue.enqueue(item(2))
        assert values(next(queue)) == [1, 2]

    def test_enqueue_checks_info_too(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2)
        queue.enqueue(item(1), {"stream": torch.zeros(1, 1)})
        with pytest.raises(ValueError):
            queue.enqueue(item(2), {"stream": torch.zeros(())})
        with pytest.raises(ValueError):
            queue.enqueue(item(2), {"other": torch.zeros(1, 1)})
        queue.enqueue(item(3), {"stream": torch.ones(1, 1)})
        batch, info = next(queue.with_info())
        assert values(batch) == [1, 3]
        assert info["stream"].tolist() == [[0, 1]]

    def test_a_first_info_without_a_batch_dimension_is_refused(self) -> None:
        queue = BatchingQueue()
        with pytest.raises(ValueError, match="dimensions"):
            queue.enqueue(item(1), {"stream": torch.zeros(())})


class TestIteration:
    def test_items_are_joined_leaf_by_leaf_along_the_batch_dimension(self) -> None:
        queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
        queue.enqueue([np.array([1, 2]), {"b": np.array([[1.0]]), "a": torch.tensor([True])}])
        queue.enqueue([np.array([3]), {"a": torch.tensor([False]), "b": np.array([[2.0], [3.0]])}])
        numbers, rest = next(queue)
        assert numbers.tolist() == [1, 2, 3]
        assert list(rest) == ["a", "b"]
        assert rest["a"].tolist() == [True, False] and rest["b"].tolist() == [[1], [2], [3]]

    def test_vectors_come_back_as_tuples_of_tensors(self) -> None:
        queue = BatchingQueue()
        queue.enqueue([item(1), [np.zeros((1, 1))]])
        batch = next(queue)
        assert type(batch) is tuple and type(batch[1]) is tuple
        assert isinstance(batch[0], torch.Tensor) and isinstance(batch[1][0], torch.Tensor)

    def test_the_maximum_counts_items_and_not_rows(self) -> None:
        queue = BatchingQueue(maximum_batch_size=2)
        for value, columns in ((1, 3), (2, 1), (3, 2)):
            queue.enqueue(item(value, columns))
        assert values(next(queue)) == [1, 1, 1, 2]
        assert values(next(queue)) == [3, 3]

    def test_items_of_size_zero_are_items(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2)
        queue.enqueue(item(1, 0))
        queue.enqueue(item(2, 0))
        assert next(queue).shape == (2, 0)

    def test_a_consumer_waits_for_the_minimum(self) -> None:
        queue = BatchingQueue(minimum_batch_size=3)
        consumer = Background(next, queue)
        for value in (1, 2):
            queue.enqueue(item(value))
            consumer.wait_until_blocked()
        queue.enqueue(item(3))
        assert values(consumer.result()) == [1, 2, 3]

    def test_a_full_minimum_does_not_wait_for_the_timeout(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2, timeout_ms=60_000)
        queue.enqueue(item(1))
        consumer = Background(next, queue)
        queue.enqueue(item(2))
        assert values(consumer.result()) == [1, 2]

    def test_after_the_timeout_the_first_item_is_enough(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2, timeout_ms=1)
        consumer = Background(next, queue)
        consumer.wait_until_blocked()  # without a limit: the timeout has passed
        queue.enqueue(item(1))
        assert values(consumer.result()) == [1]

    def test_waiting_does_not_block_the_interpreter(self) -> None:
        queue = BatchingQueue()
        consumer = Background(next, queue)
        consumer.wait_until_blocked()  # this line is Python, and runs
        queue.enqueue(item(1))
        assert values(consumer.result()) == [1]

    def test_with_info_yields_the_info_of_items(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2)
        for value in (1, 2):
            queue.enqueue(item(value), {"stream": np.array([[value]])})
        [(batch, info)] = [next(queue.with_info())]
        assert values(batch) == [1, 2] and info["stream"].tolist() == [[1, 2]]

    def test_the_info_of_items_without_one_is_empty(self) -> None:
        queue = BatchingQueue()
        queue.enqueue(item(1))
        assert next(queue.with_info())[1] == ()

    def test_with_info_outlives_the_name_of_its_queue(self) -> None:
        queue = BatchingQueue()
        queue.enqueue(item(1))
        iterator = queue.with_info()
        del queue
        assert values(next(iterator)[0]) == [1]

    def test_many_producers_and_consumers_pass_every_item_exactly_once(self) -> None:
        queue = BatchingQueue(maximum_batch_size=3, maximum_queue_size=4)
        consumers = [Background(lambda: [v for b in queue for v in values(b)]) for _ in range(3)]
        producers = [
            Background(lambda first: [queue.enqueue(item(first + i)) for i in range(100)], 100 * p)
            for p in range(4)
        ]
        for producer in producers:
            producer.result()
        wait_for(lambda: queue.size() == 0)
        queue.close()
        got = sorted(value for consumer in consumers for value in consumer.result())
        assert got == list(range(400))

    def test_one_producers_items_keep_their_order(self) -> None:
        queue = BatchingQueue(maximum_batch_size=2, maximum_queue_size=2)
        producer = Background(lambda: [queue.enqueue(item(i)) for i in range(200)])
        got: list[float] = []
        while len(got) < 200:
            got += values(next(queue))
        producer.result()
        assert got == list(range(200))


def pairs(spare_columns: int) -> BatchingQueue:
    """Returns a queue whose batches are two items."""
    return BatchingQueue(minimum_batch_size=2, maximum_batch_size=2, spare_columns=spare_columns)


def large(value: int) -> dict[str, Any]:
    """Returns an item of two columns, large enough for recycled memory, without equal numbers."""
    frames = 1000 * value + np.arange(6 * 2 * 300).reshape(6, 2, 300)
    return {"frames": frames, "reward": np.full((6, 2), value, np.float32)}


def beside(value: int) -> dict[str, Any]:
    """Returns info of two columns, and of as many truncated episodes as the value."""
    return {"stream": np.array([[value, -value]]), "finals": np.full((1, value, 3), value)}


def batch_of(queue: BatchingQueue, first: int, second: int) -> tuple[Any, Any]:
    for value in (first, second):
        queue.enqueue(large(value), beside(value))
    return next(queue.with_info())


def views(batch: tuple[Any, Any]) -> list[np.ndarray]:
    """Returns numpy views of all leaves."""
    data, info = batch
    return [leaf.numpy() for part in (data, info) for _, leaf in sorted(part.items())]


class TestSpareColumns:
    def test_every_leaf_has_spare_columns_after_those_of_its_items(self) -> None:
        data, info = batch_of(pairs(5), 1, 2)
        assert data["frames"].shape == (6, 9, 300) and data["reward"].shape == (6, 9)
        assert info["stream"].shape == (1, 9) and info["finals"].shape == (1, 1 + 2 + 5, 3)

    @pytest.mark.parametrize("spare_columns", [1, 2, 28])
    def test_the_joined_columns_are_those_of_a_batch_without_spare_columns(
        self, spare_columns: int
    ) -> None:
        found = views(batch_of(pairs(spare_columns), 3, 4))
        expected = views(batch_of(pairs(0), 3, 4))
        assert len(found) == len(expected) == 4
        for has, wanted in zip(found, expected, strict=True):
            assert has.dtype == wanted.dtype
            np.testing.assert_array_equal(has[:, :-spare_columns], wanted)

    def test_each_leaf_is_one_dense_array(self) -> None:
        for view in views(batch_of(pairs(3), 1, 2)):
            assert view.flags.c_contiguous and view.flags.writeable

    def test_spare_columns_keep_what_is_written_while_other_batches_come_and_go(self) -> None:
        queue = pairs(3)
        early = batch_of(queue, 1, 2)
        for view in views(early):
            view[:, -3:] = 77
        for value in range(5):
            for view in views(batch_of(queue, value, value)):
                view[...] = 55
        assert all((view[:, -3:] == 77).all() for view in views(early))
        for has, wanted in zip(views(early), views(batch_of(pairs(0), 1, 2)), strict=True):
            np.testing.assert_array_equal(has[:, :-3], wanted)

    def test_what_is_written_never_reaches_the_columns_of_a_later_batch(self) -> None:
        queue, expected = pairs(3), views(batch_of(pairs(0), 1, 2))
        addresses = set()
        for _ in range(50):
            batch = batch_of(queue, 1, 2)
            addresses.add(batch[0]["frames"].data_ptr())
            for has, wanted in zip(views(batch), expected, strict=True):
                np.testing.assert_array_equal(has[:, :-3], wanted)
                has[...] = 99
        assert len(addresses) < 25, "memory is used again, also where tests before left much idle"

    def test_writing_to_a_batch_of_one_item_leaves_the_item_alone(self) -> None:
        frames = np.zeros((6, 2, 300))
        queue = BatchingQueue(spare_columns=1)
        queue.enqueue(frames)
        next(queue).fill_(1)
        assert (frames == 0).all()

    def test_queues_with_other_spare_columns_do_not_mix(self) -> None:
        queues = {spare: pairs(spare) for spare in (0, 1, 28)}
        expected = views(batch_of(pairs(0), 1, 2))
        for _ in range(5):
            batches = {spare: views(batch_of(queue, 1, 2)) for spare, queue in queues.items()}
            for spare, batch in batches.items():
                for has, wanted in zip(batch, expected, strict=True):
                    columns = wanted.shape[1]
                    assert has.shape[1] == columns + spare
                    np.testing.assert_array_equal(has[:, :columns], wanted)
                    has[...] = spare + 7

    def test_spare_columns_do_not_change_how_a_queue_ends(self) -> None:
        queue = pairs(3)
        consumer = Background(list, queue)
        consumer.wait_until_blocked()
        queue.enqueue(large(1))
        queue.close()
        [batch] = consumer.result()
        assert batch["frames"].shape == (6, 2 + 3, 300)
        with pytest.raises(StopIteration):
            next(queue)

    @pytest.mark.parametrize("spare_columns", [-1, 2**31])
    def test_an_impossible_number_of_spare_columns_is_refused_with_both_sides(
        self, spare_columns: int
    ) -> None:
        with pytest.raises(ValueError) as failure:
            BatchingQueue(spare_columns=spare_columns)
        assert str(failure.value) == (
            f"spare_columns must be between 0 and 2147483647, got {spare_columns}"
        )

    def test_a_batch_larger_than_memory_raises_memory_error_in_the_consumer(self) -> None:
        queue = BatchingQueue(spare_columns=2**31 - 1)
        queue.enqueue(np.zeros((100, 1, 2**16), np.uint8))
        with pytest.raises(MemoryError):
            next(queue)


class TestClose:
    def test_is_closed_is_false_until_close(self) -> None:
        queue = BatchingQueue()
        assert queue.is_closed() is False and queue.size() == 0
        queue.close()
        assert queue.is_closed() is True

    def test_a_second_close_is_an_error(self) -> None:
        queue = BatchingQueue()
        queue.close()
        with pytest.raises(RuntimeError) as failure:
            queue.close()
        assert str(failure.value) == "Queue was closed already"
        assert not isinstance(failure.value, ClosedBatchingQueue)

    def test_of_many_simultaneous_closes_one_succeeds(self) -> None:
        for _ in range(ENDINGS):
            queue = BatchingQueue()
            barrier = threading.Barrier(4)

            def close(queue: BatchingQueue = queue, barrier: Any = barrier) -> bool:
                barrier.wait(SOON)
                try:
                    queue.close()
                except RuntimeError:
                    return False
                return True

            assert sum(c.result() for c in [Background(close) for _ in range(4)]) == 1

    def test_a_closed_queue_yields_nothing(self) -> None:
        queue = BatchingQueue()
        queue.enqueue(item(1))
        queue.close()
        with pytest.raises(StopIteration):
            next(queue)
        with pytest.raises(StopIteration):
            next(queue.with_info())
        assert list(queue) == [] and queue.size() == 0

    def test_close_wakes_every_consumer(self) -> None:
        queue = BatchingQueue(minimum_batch_size=2)
        consumers = [Background(list, queue) for _ in range(3)]
        for consumer in consumers:
            consumer.wait_until_blocked()
        queue.close()
        assert [consumer.result() for consumer in consumers] == [[], [], []]

    @pytest.mark.parametrize("timeout_ms", [None, 50, 60_000])
    def test_close_wakes_a_consumer_that_waits_with_a_timeout(self, timeout_ms: int | None) -> None:
        for _ in range(ENDINGS):
            queue = BatchingQueue(timeout_ms=timeout_ms)
            consumer = Background(list, queue)
            queue.close()
            assert consumer.result() == []

    def test_close_wakes_every_producer(self) -> None:
        for _ in range(ENDINGS):
            queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
            queue.enqueue(item(0))
            producers = [Background(queue.enqueue, item(1)) for _ in range(3)]
            queue.close()
            for producer in producers:
                with pytest.raises(ClosedBatchingQueue, match="^Enqueue to closed queue$"):
                    producer.result()

    def test_an_item_enqueued_while_a_consumer_waits_is_not_lost_at_close(self) -> None:
        for value in range(ENDINGS):
            queue = BatchingQueue()
            consumer = Background(next, queue)
            consumer.wait_until_blocked()
            queue.enqueue(item(value))
            queue.close()
            assert values(consumer.result()) == [value]
            with pytest.raises(StopIteration):
                next(queue)

    def test_items_below_the_minimum_are_not_lost_at_close(self) -> None:
        for value in range(ENDINGS):
            queue = BatchingQueue(minimum_batch_size=3)
            consumer = Background(list, queue)
            consumer.wait_until_blocked()
            queue.enqueue(item(value))
            queue.close()
            assert [values(batch) for batch in consumer.result()] == [[value]]

    def test_waiting_consumers_share_the_items_that_were_enqueued(self) -> None:
        for _ in range(ENDINGS):
            queue = BatchingQueue(minimum_batch_size=2, maximum_batch_size=2)
            consumers = [Background(list, queue) for _ in range(2)]
            for consumer in consumers:
                consumer.wait_until_blocked()
            for value in range(3):
                queue.enqueue(item(value))
            queue.close()
            batches = [batch for consumer in consumers for batch in consumer.result()]
            assert sorted(v for batch in batches for v in values(batch)) == [0, 1, 2]

    def test_a_queue_that_is_deleted_without_close_frees_its_items(self) -> None:
        queue = BatchingQueue()
        for value in range(10):
            queue.enqueue(item(value))
        del queue


def test_the_repr_has_the_size_and_whether_it_is_closed() -> None:
    queue = BatchingQueue(maximum_batch_size=4, maximum_queue_size=5)
    queue.enqueue(item(0))
    assert repr(queue) == "<BatchingQueue 1 of 5 items>"
    queue.close()
    assert "closed" in repr(queue)
    assert "unbounded" in repr(BatchingQueue())
