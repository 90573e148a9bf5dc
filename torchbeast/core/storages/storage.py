# SPDX-License-Identifier: Apache-2.0
"""What a Scheme asks of a storage: which batches it gives an algorithm, and with which settings.

A storage is a description and holds nothing; sources and replays own the memory.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torchbeast.core.storages.transition import Transitions

if TYPE_CHECKING:
    from torchbeast.core.algos.base import Algorithm
    from torchbeast.core.algos.factory import AlgoFactory


class Storage(ABC):
    """The storage of a scheme."""

    holds: ClassVar[type]
    """The class of batches that algorithms get from it."""

    arguments: ClassVar[Mapping[str, str]] = {}
    """Arguments of create_factory by the flags of other names."""

    @abstractmethod
    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        """Returns the settings of rollouts and replay for an algorithm, by the names of flags;
        batch_size is None where the environments decide it.
        """

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        """Returns the algorithm with this storage's settings.

        Raises NotImplementedError when the algorithm does not learn from what it holds.
        """
        taken = algo.algo.takes
        if not issubclass(self.holds, taken):
            raise NotImplementedError(
                f"{type(self).__name__} gives {self.holds.__name__}, but {algo.algo.__name__} "
                f"learns from {taken.__name__}: use {suitable_storage(algo)}"
            )
        return algo


def suitable_storage(algo: AlgoFactory) -> str:
    """Returns the name of the storage that suits an algorithm."""
    if issubclass(algo.algo.takes, Transitions):
        return "ReplayBuffer"
    if algo.algo.corrects_lag:
        return "OnPolicyVTraceBuffer"
    fields = {field.name for field in dataclasses.fields(algo.config)}
    return "OnPolicyGAEBuffer" if "gae_lambda" in fields else "OnPolicyBuffer"
