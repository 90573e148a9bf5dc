# SPDX-License-Identifier: Apache-2.0
"""What all sources with a replay say of the online source, whose rollouts fill it."""

from __future__ import annotations

from collections.abc import Mapping

from torchbeast.core.storages.rollout_store import Facts
from torchbeast.sources.contract import Away, Source


class WithReplay:
    """The common base of the sources that put a replay in front of another source.

    _facts: of the replay, as of its last use.
    """

    def __init__(self, online: Source, facts: Facts) -> None:
        self._online = online
        self._facts = facts

    @property
    def num_bytes(self) -> int:
        """Bytes of the online source; those of the replay are its own."""
        return self._online.num_bytes

    def status(self) -> Mapping[str, float]:
        """Returns the figures of the online source and of the replay."""
        facts = self._facts
        return {
            **self._online.status(),
            "replay_fill": round(facts.fill, 4),
            "samples_per_insert": round(facts.samples_per_insert, 4),
        }

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the online source's workers, by stage."""
        return self._online.seconds()

    def hanging(self) -> str:
        """Describes workers of the online source that hang; "" if there are none."""
        return self._online.hanging()

    def away(self) -> list[Away]:
        """Returns the lost streams of the online source."""
        return self._online.away()
