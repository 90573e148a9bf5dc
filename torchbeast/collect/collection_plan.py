# SPDX-License-Identifier: Apache-2.0
"""How a run collects: in the learner's process, with workers, or from environment servers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torchbeast.fleets.system import available_cores

if TYPE_CHECKING:
    from torch import nn

    from torchbeast.collect.contract import LearnerInfo, Source
    from torchbeast.envs.spec import EnvSpec


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """How a run collects. It makes the weights that act and the source of the run.

    Each kind of source has a subclass in its own module, so a program imports only its own kind.
    The fields are the facts on which advice about the run's speed depends.
    """

    num_envs: int
    processes: int | None  # processes of this run that step environments; None: others' servers do
    fixed_lag: int | None
    cores: int = field(default_factory=available_cores)  # of all machines together

    acts_where_it_steps: ClassVar[bool] = True
    """Whether actions are chosen in the processes that step environments."""
    of_processes: ClassVar[str] = "num_workers"
    """Name of the setting that holds the number of processes."""

    @property
    def has_free_cores(self) -> bool:
        """Whether there are more cores than processes of this run that step environments."""
        return self.processes is not None and self.processes < self.cores

    def weights(self, model: nn.Module, version: int) -> Any:
        """Returns the Publisher, which publishes the model's weights as this version."""
        from torchbeast.collect.weights import PublishedWeights

        return PublishedWeights(model, version)

    def source(self, learner: LearnerInfo[Any], env: EnvSpec, ending: ExitStack) -> Source:
        """Makes the source of a run.

        Args:
            learner: The learner's agent, weights and batches.
            env: The environment.
            ending: Ends the workers or closes the environments of the source.
        """
        raise NotImplementedError
