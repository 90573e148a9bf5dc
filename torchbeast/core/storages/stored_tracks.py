# SPDX-License-Identifier: Apache-2.0
"""The index of a replay: tracks of chunks in a ring, and the episodes that can be sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.storages.chunk_ring import ChunkRing
from torchbeast.core.storages.episodes import EpisodeList
from torchbeast.core.storages.replay_file import ReplayReader, ReplayWriter
from torchbeast.core.storages.tracks import Track


class StoredTracks:
    """The tracks and episodes of the chunks in a ring. A chunk is added in two steps:

        rows = stored.extend(track)         overwrites the oldest chunk if the ring is full
        ...                                 the caller fills these rows of the ring
        stored.finish(track, finals)        lists the episodes that have become complete

    episodes: those that can be sampled.

    K is the number of truncations in a chunk. The row 0 of a track counts as none: its final
    observation was in a rollout before.
    """

    def __init__(
        self,
        ring: ChunkRing,
        episodes: EpisodeList,
        done: np.ndarray,
        truncated: np.ndarray,
        frames: Sequence[np.ndarray],
    ) -> None:
        """Begins with nothing stored.

        episodes: an empty list, for those that can be sampled. done, truncated, frames: leaves of
        the ring; frames: those of the observation.
        """
        self.episodes = episodes
        self._ring = ring
        self._done, self._truncated, self._frames = done, truncated, frames
        self.clear(0)

    def clear(self, first_chunk: int) -> None:
        """Forgets everything; chunks are numbered from first_chunk on."""
        self._ring.written = first_chunk
        self.episodes.clear()
        self._first = first_chunk
        self._tracks: list[Track | None] = [None] * self._ring.num_chunks  # by index
        # By index: the chunk's number within its track.
        self._nth = np.zeros(self._ring.num_chunks, np.int64)
        # By index: the number of the chunk before and after it in its track; -1: there is none.
        self._before = np.full(self._ring.num_chunks, -1, np.int64)
        self._after = np.full(self._ring.num_chunks, -1, np.int64)
        self._finals: dict[int, list[np.ndarray]] = {}  # by chunk: leaves [K, C, ...], by row
        self._row_0s = 0  # number of chunks with the row 0 of a track only

    @property
    def chunks(self) -> range:
        """The numbers of the stored chunks, oldest first."""
        return range(max(self._first, self._ring.oldest), self._ring.written)

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return (len(self.chunks) - self._row_0s) * self._ring.unroll_length

    def tracks(self, others: Iterable[Track]) -> list[Track]:
        """Returns every track that has stored chunks, and others."""
        tracks = [*(self.track(chunk) for chunk in self.chunks), *others]
        return list({id(track): track for track in tracks}.values())

    def track(self, chunk: int) -> Track:
        """Returns the track of a stored chunk."""
        track = self._tracks[self._ring.index(chunk)]
        assert track is not None
        return track

    def locate(self, row: int) -> tuple[Track, int]:
        """Returns the track of a stored row, and its position there."""
        chunk, place = divmod(row, self._ring.unroll_length)
        return self.track(chunk), self._nth_of(chunk) * self._ring.unroll_length + place

    def rows_before(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of the rows before these in their tracks, -1 where it is not stored;
        int64 [N] both.
        """
        return self._beside(rows, -1, self._before)

    def rows_after(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of the rows after these in their tracks, -1 where there is none yet;
        int64 [N] both.
        """
        return self._beside(rows, 1, self._after)

    def _beside(self, rows: np.ndarray, step: int, neighbours: np.ndarray) -> np.ndarray:
        length = self._ring.unroll_length
        chunks, places = rows // length, rows % length + step
        others = neighbours[chunks % self._ring.num_chunks]
        found: np.ndarray = np.where(
            (places >= 0) & (places < length),
            rows + step,
            np.where(others < self.chunks.start, -1, others * length + places % length),
        )
        return found

    def rows_ahead(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns the numbers of the rows that many steps after these in their tracks, which must
        be stored; int64 [N] all.
        """
        chunks, places = np.divmod(rows, self._ring.unroll_length)
        places = places + steps
        while (beyond := places >= self._ring.unroll_length).any():
            following = self._after[chunks % self._ring.num_chunks]
            chunks = np.where(beyond, following, chunks)
            places = np.where(beyond, places - self._ring.unroll_length, places)
        ahead: np.ndarray = chunks * self._ring.unroll_length + places
        return ahead

    def begin_tracks(self, chunks: np.ndarray) -> np.ndarray:
        """Returns which of these stored chunks hold the row 0 of a track only; bool [N]."""
        begin: np.ndarray = self._nth[chunks % self._ring.num_chunks] == 0
        return begin

    def final(self, row: int) -> list[np.ndarray]:
        """Returns the newest frames [C, ...] of the final observation of a truncated row."""
        chunk, place = divmod(row, self._ring.unroll_length)
        index = int(self._truncated[self._ring.rows(chunk)][:place].sum())
        return [leaf[index] for leaf in self._finals[chunk]]

    def extend(self, track: Track) -> slice:
        """Gives the next chunk to a track and returns its ring rows."""
        chunk = self._ring.written
        if len(self.chunks) == self._ring.num_chunks:
            self._forget(self.chunks[0])
        index = self._ring.index(chunk)
        self._tracks[index], self._nth[index] = track, track.overwritten + len(track.chunks)
        self._row_0s += int(self._nth[index] == 0)
        self._before[index], self._after[index] = -1, -1
        if track.chunks:
            self._before[index] = track.chunks[-1]
            self._after[self._ring.index(track.chunks[-1])] = chunk
        track.chunks.append(chunk)
        self._ring.written += 1
        return self._ring.rows(chunk)

    def finish(self, track: Track, finals: list[np.ndarray]) -> None:
        """Takes note of what a track's newest chunk contains.

        finals: leaves [K, C, ...], newest frames of the final observations, by row; [] if K is 0.
        """
        chunk = track.chunks[-1]
        if finals:
            self._finals[chunk] = finals
        track.note_ends(self._done[self._ring.rows(chunk)])
        for episode in track.take_ready():
            self.episodes.add(track.row(episode.position), episode.length)

    def _forget(self, chunk: int) -> None:
        """Forgets the oldest chunk and the episodes that begin in it."""
        for place in np.flatnonzero(self._done[self._ring.rows(chunk)]).tolist():
            self.episodes.discard(chunk * self._ring.unroll_length + place)
        track = self.track(chunk)
        track.chunks.popleft()
        track.overwritten += 1
        self._row_0s -= int(self._nth_of(chunk) == 0)
        self._finals.pop(chunk, None)

    def _nth_of(self, chunk: int) -> int:
        return int(self._nth[self._ring.index(chunk)])

    # --- files

    def write(self, writer: ReplayWriter, tracks: Sequence[Track]) -> None:
        """Writes every chunk with the number of its track among `tracks`."""
        numbers = {id(track): number for number, track in enumerate(tracks)}
        for chunk in self.chunks:
            writer.array(np.array(numbers[id(self.track(chunk))], np.int64))
            for leaf in self._ring.leaves:
                writer.array(leaf[self._ring.rows(chunk)])
            for final in self._finals.get(chunk, ()):
                writer.array(final)

    def read(self, reader: ReplayReader, tracks: Sequence[Track], count: int) -> None:
        """Reads that many chunks and adds them to the tracks, as if they were inserted."""
        for _ in range(count):
            number = int(reader.array((), "int64"))
            require(0 <= number < len(tracks), f"there is no track {number} of {len(tracks)}")
            rows = self.extend(tracks[number])
            for leaf in self._ring.leaves:
                reader.into(leaf[rows])
            self.finish(tracks[number], self._read_finals(reader, rows, tracks[number]))

    def _read_finals(self, reader: ReplayReader, rows: slice, track: Track) -> list[np.ndarray]:
        if self._nth_of(track.chunks[-1]) == 0:  # only the last row is one
            self._done[rows][:-1] = self._truncated[rows][:-1] = False
            return []
        count = int(self._truncated[rows].sum())
        if count == 0:
            return []
        return [reader.array((count, *leaf.shape[1:]), str(leaf.dtype)) for leaf in self._frames]
