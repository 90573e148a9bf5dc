# SPDX-License-Identifier: Apache-2.0
"""What differs between algorithms. What is the same for all is `optimiser_step.OptimiserStep`.

    batch -- prepare --> batch -- minibatches --> minibatch -- losses --> terms, metrics
                                                  one optimiser step each, then after_step

An algorithm is a file: a Config, which becomes its flags, and a class that defines `losses`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor, ActorCritic, Mode
from torchbeast.core.losses import Reduction
from torchbeast.core.storages.batch import Batch
from torchbeast.core.storages.rollout import Rollout

BatchT = TypeVar("BatchT", bound=Batch)


class Optimizer(Protocol):
    """Any of torch.optim, or another of its form."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""

    def step(self) -> Any:
        """Moves the parameters by their gradients."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state_dict."""


class Losses(NamedTuple):
    """What an algorithm says of a minibatch; all are scalars."""

    terms: dict[str, Tensor]
    """Their sum is minimised; weights are included."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """Means over the steps, which are logged and never minimised."""


class Algorithm(ABC, Generic[BatchT]):
    """Losses of models, and the optimisers that minimise them.

    Whatever the next step depends on is in `models`, buffers included, or in `optimisers`: both are
    saved.
    """

    Config: ClassVar[type]
    """A frozen keyword-only dataclass with a default for every field. The fields are the
    algorithm's flags, their docstrings the help texts."""

    actor_type: ClassVar[type[Actor]] = ActorCritic
    """The kind of actor."""

    takes: ClassVar[type] = Rollout
    """The kind of batch."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Extras of acting that its batches must hold."""

    mode: ClassVar[Mode] = "sample"
    """How actions are chosen while it learns."""

    separable: ClassVar[bool] = False
    """No column of a batch depends on another, other than through the sum or mean over all steps.
    The learner may then take some columns at a time, in several threads, where the actor allows it
    too."""

    reduction: ClassVar[Reduction] = "sum"
    """How terms join steps, so that those of some columns add up to those of all."""

    minimised_by: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The optimiser of each term. One that is not named is minimised by the only optimiser. An
    optimiser sees the gradient of its own terms with respect to its own parameters, and no
    other."""

    actor: Actor
    models: dict[str, nn.Module]
    """By name. "actor" acts: its weights are published."""
    optimisers: dict[str, Optimizer]
    """By name."""

    def __init__(self, actor: Actor, config: Any) -> None:
        """Makes an algorithm without optimisers; TypeError when the actor is of another kind.

        config: of type Config.
        """
        if not isinstance(actor, self.actor_type):
            raise TypeError(
                f"{type(self).__name__} learns a network of type {self.actor_type.__name__}, got "
                f"{type(actor).__name__}: use another --model"
            )
        self.actor = actor
        self.config = config
        self.models = {"actor": actor}
        self.optimisers = {}

    def prepare(self, batch: BatchT) -> BatchT:
        """The batch as it is to be learnt from, such as with advantages; called once for each,
        without a graph.
        """
        return batch

    def minibatches(self, batch: BatchT) -> Iterable[BatchT]:
        """What each optimiser step learns from, at least one: parts of the batch, any number of
        times.
        """
        return [batch]

    @abstractmethod
    def losses(self, minibatch: BatchT) -> Losses:
        """The terms that are minimised, and metrics. May be called with some columns of a minibatch
        and by several threads at once, if `separable`.
        """

    def after_step(self) -> None:
        """Follows every optimiser step, without a graph: target networks, temperatures."""
