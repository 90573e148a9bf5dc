# SPDX-License-Identifier: Apache-2.0
"""The replay of rollouts, compared with plain lists of all rows."""

from __future__ import annotations

import io
import json
import math
import mmap
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from true_rows import BEGUN_WITH, Batch, Envs, Life, empty_batch, fields

from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.storages.replay import store as rollout_store
from torchbeast.core.storages.replay.rollout_replay import NO_ROLLOUT, RolloutReplay, Window
from torchbeast.core.storages.replay.store import bytes_per_transition

Rollouts = Sequence[tuple[Life, int]]


class Listed:
    """The contents of a replay of `slots` chunks by definition: lists, searched from the start."""

    def __init__(self, slots: int, unroll_length: int) -> None:
        self.slots, self.T = slots, unroll_length
        self.trajectories: list[tuple[Life, range]] = []  # all rows that were ever inserted
        self.chunks: list[tuple[int, range]] = []  # number of the trajectory and rows, oldest first

    def insert(self, rollouts: Rollouts) -> None:
        for life, first in rollouts:
            rows = range(first + 1, first + self.T + 1)
            ends = [(other, trajectory.stop) for other, trajectory in self.trajectories]
            if (life, first + 1) in ends:
                number = ends.index((life, first + 1))
                self.trajectories[number] = (
                    life,
                    range(self.trajectories[number][1].start, rows.stop),
                )
            else:
                number = len(self.trajectories)
                self.trajectories.append((life, range(first, rows.stop)))
                self.chunks.append((number, range(first, first + 1)))
            self.chunks = [*self.chunks, (number, rows)][-self.slots :]

    def transitions(self) -> int:
        """All stored rows but the first of a trajectory."""
        return sum(
            row > self.trajectories[number][1].start
            for number, chunk in self.chunks
            for row in chunk
        )

    def episodes(self) -> set[tuple[Life, int, int]]:
        """Lives, first rows and lengths of the episodes that can be sampled."""
        stored = {(number, row) for number, chunk in self.chunks for row in chunk}
        return {
            (self.trajectories[number][0], start, end - start)
            for number in {number for number, _ in stored}
            for start, end in ends(*self.trajectories[number])
            if all((number, row) in stored for row in range(start, start + self.T + 1))
        }


def ends(life: Life, rows: range) -> list[tuple[int, int]]:
    """First rows of the complete episodes in a trajectory, and of those that follow them."""
    borders = pairwise(row for row in rows if life.rows[row].values["done"])
    return [(start, end) for start, end in borders if life.rows[end].is_end]


def play(envs: Envs, keys: Sequence[tuple[int, int]], interrupt: float = 0.0) -> Rollouts:
    interrupted = envs.rng.random(len(keys)) < interrupt
    return [
        envs.next_rollout(*key, interrupted=bool(cut))
        for key, cut in zip(keys, interrupted, strict=True)
    ]


def insert(replay: RolloutReplay, envs: Envs, rollouts: Rollouts) -> None:
    """Inserts one or two batches for each agent."""
    for agent in {life.agent for life, _ in rollouts}:
        mine = [rollout for rollout in rollouts if rollout[0].agent == agent]
        middle = int(envs.rng.integers(len(mine) + 1))
        for part in filter(None, (mine[:middle], mine[middle:])):
            batch = envs.batch(part)
            replay.insert(batch, agent)
            for leaf in flatten(batch):  # its memory is used for another batch
                leaf.reshape(-1).view(np.uint8)[...] = 170


def read(replay: RolloutReplay, window: Window, k: int) -> tuple[Batch, list[Any]]:
    batch = empty_batch(replay.unroll_length, 3, k)
    before = map_leaves(np.copy, batch)
    finals = replay.read(window, batch, 1)
    for leaf, old in zip(flatten(batch), flatten(before), strict=True):
        assert leaf[:, ::2].tobytes() == old[:, ::2].tobytes(), "another column was written to"
    return batch, finals


def check_window(replay: RolloutReplay, window: Window, envs: Envs) -> tuple[Life, int]:
    """Compares a window with the true rows bit for bit; returns the life and its first row."""
    T, k = replay.unroll_length, envs.k
    batch, finals = read(replay, window, k)
    life, second = envs.by_id[batch["policy_version"][1, 1]]
    row = second - 1
    true = empty_batch(T, 3, k)
    true_finals = envs.write(true, 1, life, row)
    true["env_index"][:, 1], true["rollout_index"][:, 1] = life.env_index, NO_ROLLOUT
    if window.position == T - 1 and row > 0:  # row 0 of a trajectory, from its rollout
        true["policy_version"][0, 1] = BEGUN_WITH
    assert window.trajectory.agent == life.agent
    for name in true:
        for leaf, expected in zip(flatten(batch[name]), flatten(true[name]), strict=True):
            assert leaf.tobytes() == expected.tobytes(), name
    rows = [t for t in range(1, T + 1) if life.rows[row + t].values["truncated"]]
    assert len(finals) == len(rows)
    for leaves, expected in zip(finals, true_finals, strict=True):
        for leaf, true_leaf in zip(leaves, flatten(expected), strict=True):
            assert leaf.tobytes() == true_leaf.tobytes() and leaf.shape == true_leaf.shape
    return life, row


CASES = [
    # T, k, capacity, probability of an end
    (1, 1, 40, 0.3),
    (1, 4, 40, 0.1),
    (2, 4, 4, 0.4),
    (2, 3, 50, 0.15),
    (3, 4, 45, 0.2),
    (4, 4, 100, 0.1),
    (4, 2, 61, 0.6),
    (5, 1, 200, 0.15),
    (5, 4, 200, 1.0),
    (7, 4, 400, 0.03),
]
KEYS = [(agent, env_index) for agent in range(2) for env_index in (0, 3, 65536)]


def play_some(envs: Envs) -> Rollouts:
    """A rollout each of some of the environments; some others are lost, or restarted."""
    count = int(envs.rng.integers(1, len(KEYS) + 1))
    chosen = sorted(envs.rng.choice(len(KEYS), count, replace=False))
    rollouts = play(envs, [KEYS[index] for index in chosen], interrupt=0.05)
    return [rollout for rollout in rollouts if envs.rng.random() > 0.1]


@pytest.mark.parametrize(
    ("T", "k", "capacity", "ends", "late"),
    [
        pytest.param(*case, late, marks=[pytest.mark.long] if late == bool(i % 2) else [])
        for i, case in enumerate(CASES)
        for late in (False, True)
    ],
)
def test_windows_are_true_rows_and_episodes_those_of_the_definition(
    T: int, k: int, capacity: int, ends: float, late: bool
) -> None:
    envs = Envs(10 * T + k, T, k, ends, late)
    replay = RolloutReplay(fields(T, 1, k), capacity, k)
    listed = Listed(capacity // T, T)
    seen, compared = set(), 0
    for _ in range(50):
        rollouts = play_some(envs)
        insert(replay, envs, rollouts)
        listed.insert(rollouts)
        assert replay.size == listed.transitions() <= capacity
        episodes = listed.episodes()
        assert replay.stats().episodes == len(episodes)
        for slot in range(4 if episodes else 0):
            window = replay.draw() if slot % 2 else replay.walk(0, slot)
            life, row = check_window(replay, window, envs)
            start = row - (window.position - window.episode)
            [length] = [n for other, first, n in episodes if (other, first) == (life, start)]
            assert 0 <= row - start < length
            seen.add((life, start))
            compared += 1
    assert capacity < 10 or (compared > 30 and len(seen) >= 8)


def one_life(T: int, lengths: Sequence[int], k: int = 1) -> tuple[Envs, list[tuple[Life, int]]]:
    """Rollouts of one environment whose episodes have these lengths, as far as they are whole."""
    envs = Envs(3, T, k, ends=0.0)
    borders = {sum(lengths[:i]) for i in range(1, len(lengths) + 1)}
    rollouts = [envs.next_rollout(0, 5) for _ in range(sum(lengths) // T)]
    for row in borders & set(range(len(rollouts) * T + 1)):
        rollouts[0][0].rows[row].values["done"] = True
    return envs, rollouts


def insert_all(replay: RolloutReplay, envs: Envs, rollouts: Rollouts) -> None:
    for rollout in rollouts:
        insert(replay, envs, [rollout])


def row_of(window: Window) -> int:
    """The row of a life that its first rollout began in, from the definition of a position."""
    return window.position - (window.trajectory.unroll_length - 1)


def test_the_oldest_episodes_go_first_and_only_when_their_first_row_is_overwritten() -> None:
    T, slots = 4, 6
    envs, rollouts = one_life(T, [6] * 20)
    replay = RolloutReplay(fields(T, 1, 1), slots * T)
    listed = Listed(slots, T)
    starts: list[set[int]] = []
    for rollout in rollouts:
        insert(replay, envs, [rollout])
        listed.insert([rollout])
        windows = [replay.draw() for _ in range(80 if replay.stats().episodes else 0)]
        starts.append({row_of(window) - (window.position - window.episode) for window in windows})
        assert starts[-1] == {first for _, first, _ in listed.episodes()}
    for before, after in pairwise(starts):
        assert all(gone < kept for gone in before - after for kept in before & after)
    assert set.union(*starts) == set(range(0, 120, 6)) and len(starts[-1]) == 3


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    return sum((counts[key] - value) ** 2 / value for key, value in expected.items())


def far_off(degrees: int) -> float:
    """Six standard deviations above the mean of chi-square."""
    return degrees + 6 * math.sqrt(2 * degrees)


def test_episodes_are_drawn_uniformly_and_then_their_rows() -> None:
    T, lengths = 4, [2, 30, 7, 1, 12, 4, 20]
    envs, rollouts = one_life(T, [*lengths, 8])
    replay = RolloutReplay(fields(T, 1, 1), 1000, seed=1)
    insert_all(replay, envs, rollouts)
    assert replay.stats().episodes == len(lengths) + 1
    draws = 20_000
    windows = [replay.draw() for _ in range(draws)]
    episodes = Counter(row_of(w) - (w.position - w.episode) for w in windows)
    share = draws / replay.stats().episodes
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert chi_square(episodes, dict.fromkeys(starts, share)) < far_off(len(starts) - 1)
    for start, length in zip(starts, lengths, strict=False):
        rows = Counter(row_of(w) for w in windows if w.episode == w.position - row_of(w) + start)
        expected = dict.fromkeys(range(start, start + length), episodes[start] / length)
        assert set(rows) == set(expected)
        assert chi_square(rows, expected) < far_off(length)
    last = {row_of(w) for w in windows if row_of(w) >= starts[-1]}
    assert last == set(range(starts[-1], len(rollouts) * T - T + 1)), "rows with T rows after them"


def test_a_walk_goes_from_an_episodes_first_row_to_its_end_t_rows_at_a_time() -> None:
    T, lengths = 4, [3, 13, 8, 4, 5, 40]
    envs, rollouts = one_life(T, lengths)
    replay = RolloutReplay(fields(T, 1, 1), 1000, seed=2)
    insert_all(replay, envs, rollouts[:-9])  # the last episode is not over
    starts = [sum(lengths[:i]) for i in range(len(lengths) - 1)]
    walks: dict[int, list[list[int]]] = {0: [], 1: []}
    for slot in (0, 1, 1, 0) * 60:
        window = replay.walk(0, slot)
        assert window.begins == (window.position == window.episode)
        if window.begins:
            walks[slot].append([])
        walks[slot][-1].append(row_of(window))
    for walk in [*walks[0][:-1], *walks[1][:-1]]:
        length = lengths[starts.index(walk[0])]
        assert walk == list(range(walk[0], walk[0] + length, T))
    assert {walk[0] for walk in walks[0]} == {walk[0] for walk in walks[1]} == set(starts)
    assert walks[0] != walks[1]


def test_a_walk_through_an_overwritten_episode_goes_on_with_another() -> None:
    T = 2
    envs, rollouts = one_life(T, [8] * 6)
    replay = RolloutReplay(fields(T, 1, 1), 8 * T)
    insert_all(replay, envs, rollouts[:7])
    walked = [row_of(replay.walk(0, 0)) for _ in range(2)]
    assert walked == [0, T]
    insert_all(replay, envs, rollouts[7:10])
    window = replay.walk(0, 0)
    assert window.begins and row_of(window) == 8


def test_a_walk_ends_where_the_rows_of_its_last_window_are_not_all_stored() -> None:
    T = 4
    envs, rollouts = one_life(T, [1, 10, 50])
    replay = RolloutReplay(fields(T, 1, 1), 1000)
    insert_all(replay, envs, rollouts[:3])  # rows up to 12
    walked = [row_of(replay.walk(0, 0)) for _ in range(30)]
    assert 5 in walked and 9 not in walked
    insert_all(replay, envs, rollouts[3:4])
    assert 9 in [row_of(replay.walk(0, 0)) for _ in range(30)]


def test_walks_that_are_forgotten_begin_anew() -> None:
    envs, rollouts = one_life(2, [20, 20])
    replay = RolloutReplay(fields(2, 1, 1), 1000)
    insert_all(replay, envs, rollouts)
    replay.walk(0, 0)
    assert not replay.walk(0, 0).begins
    replay.forget_walks(0)
    assert replay.walk(0, 0).begins


def test_rollouts_of_another_source_continue_none() -> None:
    T = 2
    envs, rollouts = one_life(T, [40])
    replay = RolloutReplay(fields(T, 1, 1), 1000)
    insert_all(replay, envs, rollouts[:1])
    insert(replay, envs, [envs.next_rollout(1, 5)])
    other = Envs(9, T, 1)
    resumed = [other.next_rollout(0, 5), other.next_rollout(0, 5)]
    replay.new_source(0)
    replay.insert(other.batch(resumed[1:]), 0)
    insert(replay, envs, [envs.next_rollout(1, 5)])
    assert replay.size == 4 * T
    assert replay.stats().fill == 7 / 500, "four rollouts, and row 0 of three trajectories"


def test_environments_that_come_and_go_leave_nothing_but_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_store, "_MANY_ENVIRONMENTS", 0)
    T, slots = 2, 8
    envs, _ = one_life(T, [])
    replay = RolloutReplay(fields(T, 1, 1), slots * T)
    for env in range(200):
        insert(replay, envs, [envs.next_rollout(0, env)])
        insert(replay, envs, [envs.next_rollout(0, env)])
    assert len(replay._open) <= 2 * slots


# --- what is refused


def test_nothing_is_sampled_before_an_episode_is_complete() -> None:
    replay = RolloutReplay(fields(4, 1, 1), 100)
    for sample in (replay.draw, lambda: replay.walk(0, 0)):
        with pytest.raises(LookupError, match="no complete episode"):
            sample()


# --- memory and facts


def test_frames_are_stored_once_and_counted_before_they_are_reserved() -> None:
    whole, single = (bytes_per_transition(fields(4, 1, 4), k) for k in (1, 4))
    stack_bytes = 4 * 2 * 3 + 2 * 4 * 4
    assert whole - single == stack_bytes * 3 // 4
    others = 4 + 1 + 1 + 1 + 4 + 4 + 8 + 3 * 4 + 8  # of a row, beside its observation
    assert single == stack_bytes // 4 + others
    replay = RolloutReplay(fields(4, 1, 4), 402, 4)
    assert sum(leaf.nbytes for leaf in replay._ring.leaves) == 400 * single


def test_facts_tell_fill_and_samples_per_insert() -> None:
    T = 4
    envs, rollouts = one_life(T, [5] * 8)
    replay = RolloutReplay(fields(T, 1, 1), 20 * T)
    assert replay.stats() == (0.0, 0.0, 0, 0)
    insert_all(replay, envs, rollouts)
    insert(replay, envs, [envs.next_rollout(1, 0)])
    insert(replay, envs, [envs.next_rollout(0, 5)])
    for _ in range(3):
        read(replay, replay.draw(), 1)
    stats = replay.stats()
    assert stats.fill == (len(rollouts) + 2 + 2) / 20, "two trajectories have a row 0 each"
    assert stats.samples_per_insert == 3 / (len(rollouts) + 2)


# --- files


def saved(replay: RolloutReplay) -> bytes:
    file = io.BytesIO()
    replay.save(file)
    return file.getvalue()


def loaded(data: bytes, T: int, k: int, capacity: int) -> RolloutReplay:
    replay = RolloutReplay(fields(T, 1, k), capacity, k, seed=99)
    replay.load(io.BytesIO(data))
    return replay


@pytest.mark.parametrize(("T", "k", "capacity", "ends"), CASES)
def test_a_loaded_replay_continues_as_the_saved_one(
    T: int, k: int, capacity: int, ends: float
) -> None:
    envs = Envs(50 + T, T, k, ends)
    replay = RolloutReplay(fields(T, 1, k), capacity, k)
    for _ in range(15):
        insert(replay, envs, play_some(envs))
        if replay.stats().episodes:
            read(replay, replay.draw(), k)
    copy = loaded(saved(replay), T, k, capacity)
    assert saved(copy) == saved(replay)
    for _ in range(15):
        rollouts = play_some(envs)
        for each in (replay, copy):
            state = envs.rng.bit_generator.state
            insert(each, envs, rollouts)
            envs.rng.bit_generator.state = state
        assert (copy.size, copy.stats().episodes) == (replay.size, replay.stats().episodes)
        for _ in range(4 if replay.stats().episodes else 0):
            mine, other = (each.draw() for each in (replay, copy))
            assert mine[1:] == other[1:]
            assert check_window(replay, mine, envs) == check_window(copy, other, envs)
    assert copy.stats()[:2] == replay.stats()[:2]


class Counting(io.BytesIO):
    """A file that notes the largest array read or written at once."""

    largest = 0

    def write(self, data: Any) -> int:
        self.largest = max(self.largest, memoryview(data).nbytes)
        return super().write(data)

    def readinto(self, data: Any) -> int:
        self.largest = max(self.largest, memoryview(data).nbytes)
        return super().readinto(data)


def test_a_replay_is_saved_and_loaded_one_leaf_of_a_chunk_at_a_time() -> None:
    T, k = 50, 1
    envs = Envs(1, T, k, 0.02)
    replay = RolloutReplay(fields(T, 1, k), 10_000, k)
    for _ in range(60):
        insert(replay, envs, [envs.next_rollout(0, 0)])
    file = Counting()
    replay.save(file)
    copy = RolloutReplay(fields(T, 1, k), 10_000, k)
    file.seek(0)
    copy.load(file)
    assert len(file.getvalue()) > 60 * 50 * 50
    assert file.largest < 2000, "T * 12 bytes of logits, and the header"


@pytest.mark.parametrize("capacity", [30, 1000])
def test_a_replay_of_another_capacity_loads_the_newest_that_fits(capacity: int) -> None:
    T, k = 3, 2
    envs = Envs(8, T, k, 0.2)
    listed = Listed(capacity // T, T)
    replay = RolloutReplay(fields(T, 1, k), 120, k)
    for _ in range(40):
        rollouts = play_some(envs)
        insert(replay, envs, rollouts)
        listed.insert(rollouts)
    listed.chunks = listed.chunks[-40:]
    copy = loaded(saved(replay), T, k, capacity)
    assert copy.size == listed.transitions()
    assert copy.stats().episodes == len(listed.episodes()) > 0
    for _ in range(20):
        check_window(copy, copy.draw(), envs)


def small() -> bytes:
    envs = Envs(1, 3, 2, 0.3)
    replay = RolloutReplay(fields(3, 1, 2), 60, 2)
    for _ in range(12):
        insert(replay, envs, play_some(envs))
    return saved(replay)


def test_every_damaged_byte_and_every_missing_end_is_a_sentence_and_leaves_an_empty_replay() -> (
    None
):
    data = small()
    rng = np.random.default_rng(0)
    replay = RolloutReplay(fields(3, 1, 2), 60, 2)
    header_end = 26 + int.from_bytes(data[18:26], "little")
    places = [*range(header_end), *rng.integers(header_end, len(data), 300).tolist()]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError, match="the saved replay (is damaged|cannot be used): "):
            replay.load(io.BytesIO(bytes(damaged)))
        assert replay.size == replay.stats().episodes == 0
    for end in rng.integers(len(data), size=50):
        with pytest.raises(ValueError, match="the file ends too early"):
            replay.load(io.BytesIO(data[:end]))
    replay.load(io.BytesIO(data))
    assert replay.size > 0


@pytest.mark.parametrize(
    ("T", "k", "message"),
    [(4, 2, "its unroll_length is 3, not 4"), (3, 1, "its frame_stack is 2, not 1")],
)
def test_a_replay_of_other_rows_is_not_loaded(T: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutReplay(fields(T, 1, k), 60, k).load(io.BytesIO(small()))


def test_other_fields_are_not_loaded() -> None:
    specs = fields(3, 1, 2)
    specs["extras"] = {}
    with pytest.raises(ValueError, match="its rows is .*policy_logits|its rows is .*extras"):
        RolloutReplay(specs, 60, 2).load(io.BytesIO(small()))


def with_checksum(data: bytes) -> bytes:
    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


def with_header(data: bytes, header: Any) -> bytes:
    size = int.from_bytes(data[18:26], "little")
    text = json.dumps(header).encode()
    return with_checksum(data[:18] + len(text).to_bytes(8, "little") + text + data[26 + size :])


def use(replay: RolloutReplay, data: bytes) -> bool:
    """Loads a file; returns whether it could be, after using everything that it may have spoilt."""
    try:
        replay.load(io.BytesIO(data))
    except ValueError:
        assert replay.size == replay.stats().episodes == 0
        return False
    for slot in range(6 if replay.stats().episodes else 0):
        read(replay, replay.draw(), 2)
        read(replay, replay.walk(0, slot % 4), 2)
    envs = Envs(2, 3, 2, 0.3)
    for agent in (0, 1):
        replay.new_source(agent)
    insert(replay, envs, play(envs, KEYS))
    return True


def test_a_file_of_false_contents_is_refused_or_used_without_harm() -> None:
    data = small()
    replay = RolloutReplay(fields(3, 1, 2), 60, 2)
    start = 26 + int.from_bytes(data[18:26], "little")
    rng = np.random.default_rng(5)
    usable = 0
    for _ in range(150):
        false = np.frombuffer(data, np.uint8).copy()
        false[rng.integers(start, len(data) - 4, size=rng.integers(1, 200))] = rng.integers(3)
        usable += use(replay, with_checksum(false.tobytes()))
    assert 0 < usable < 150


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries of a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield (*path, key)
        if isinstance(entry, (dict, list)):
            yield from places_in(entry, (*path, key))


@pytest.mark.parametrize(
    "false", [-1, 0, 1, 2**40, 2**63, 2**200, 1.5, True, None, "x", [], [[0]], {}]
)
def test_a_false_header_is_refused_or_used_without_harm(false: Any) -> None:
    data = small()
    replay = RolloutReplay(fields(3, 1, 2), 60, 2)
    size = int.from_bytes(data[18:26], "little")
    header = json.loads(data[26 : 26 + size])
    tried = 0
    for *path, last in places_in(header):
        copy = json.loads(json.dumps(header))
        place = copy
        for key in path:
            place = place[key]
        place[last] = false
        use(replay, with_header(data, copy))
        tried += 1
    assert tried > 40
    for whole in (false, [false]):
        assert not use(replay, with_header(data, whole))
    assert use(replay, data)


@pytest.mark.parametrize("text", [b"", b"[" * 100, b"\xff", b"1", b"{}"])
def test_a_header_that_is_none_is_a_sentence(text: bytes) -> None:
    data = b"torchbeast replay\n" + len(text).to_bytes(8, "little") + text
    with pytest.raises(ValueError, match="the saved replay (is damaged|cannot be used): "):
        RolloutReplay(fields(3, 1, 2), 60, 2).load(io.BytesIO(data))


def test_other_files_and_newer_formats_are_told() -> None:
    replay = RolloutReplay(fields(3, 1, 2), 60, 2)
    with pytest.raises(ValueError, match="the file is not a saved replay"):
        replay.load(io.BytesIO(b"PK" * 100))
    data = small().replace(b'"format": 2', b'"format": 3')
    with pytest.raises(ValueError, match="its format is 3, but this TorchBeast reads format 2"):
        replay.load(io.BytesIO(data))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_committed_as_it_is_written() -> None:
    def committed() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = committed()
    specs = fields(100, 1, 1)
    _replay = RolloutReplay(specs, 4_000_000)
    assert 4_000_000 * bytes_per_transition(specs, 1) > 200e6
    assert committed() - before < 25e6
