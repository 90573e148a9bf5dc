# SPDX-License-Identifier: Apache-2.0
"""The base class of algorithms: what differs between them. `OptimiserStep` is what they share.

    batch -- prepare --> batch -- minibatches --> minibatch -- losses --> terms, metrics
                           |                      one optimiser step each, then after_step,
                        metrics                   until there are no more or stops_after

An algorithm is a file: a Config, which becomes its flags, and a class that defines `losses`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor, ActorCritic, Mode
from torchbeast.core.losses import Mean, Reduction
from torchbeast.core.nest_py import flatten
from torchbeast.core.storages.batch import NO_FEEDBACK, Batch, Feedback
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError

if TYPE_CHECKING:
    from torchbeast.core.algos.factory import AlgoFactory


@dataclass
class Counters:
    """Counts from the start of the run, across restarts."""

    env_steps: int = 0
    """Collected steps; they determine the learning rate and the end of the run."""
    learnt_steps: int = 0
    """Steps learnt from; a step that is used twice counts twice."""
    optimiser_steps: int = 0
    """Changes of the weights."""
    version: int = 0
    """Updates, one per batch; after each the weights are published under this number."""

    def state_dict(self) -> dict[str, int]:
        """Returns the counters under the names used by all checkpoints."""
        return {
            "steps": self.env_steps,
            "version": self.version,
            "learnt_steps": self.learnt_steps,
            "optimiser_steps": self.optimiser_steps,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores `state_dict`; raises ValueError when steps or version is missing.

        Earlier checkpoints have only these two. When they were written, every step was learnt from
        once, with one optimiser step per batch.
        """
        if missing := {"steps", "version"} - set(state):
            raise ValueError(
                f"the checkpoint's scheduler_state_dict lacks {', '.join(sorted(missing))}: it was "
                "written by another program and can be tested, but not resumed"
            )
        self.env_steps, self.version = int(state["steps"]), int(state["version"])
        self.learnt_steps = int(state.get("learnt_steps", self.env_steps))
        self.optimiser_steps = int(state.get("optimiser_steps", self.version))


BatchT = TypeVar("BatchT", bound=Batch)


class Optimizer(Protocol):
    """An optimiser of torch.optim, or an object with the same methods."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""

    def step(self) -> Any:
        """Updates the parameters by their gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state_dict."""


class Losses(NamedTuple):
    """The losses and metrics of a minibatch."""

    terms: dict[str, Tensor]
    """Weighted losses, scalars whose sum is minimised."""
    metrics: Mapping[str, Tensor | Mean] = MappingProxyType({})
    """Figures that are logged but never minimised: scalars, each a mean over all valid steps, or
    `losses.mean` over some of them. One without any steps is not logged."""
    feedback: Feedback = NO_FEEDBACK
    """What the minibatch's replay needs: `priorities` where it has weights, `final_state` where it
    `feeds_back`."""


class Algorithm(ABC, Generic[BatchT]):
    """Losses of models, and the optimisers that minimise them.

    All state that the next step depends on is in `models`, including buffers, or in `optimisers`:
    both are saved in checkpoints.
    """

    Config: ClassVar[type]
    """A frozen keyword-only dataclass with a default for every field. The fields are the
    algorithm's flags, their docstrings the help texts."""

    actor_type: ClassVar[type[Actor]] = ActorCritic
    """The class of actor that it trains."""

    family: ClassVar[str] = ""
    """The family of built-in networks that --model chooses from: "q" makes mlp q-mlp. By default
    the actor-critics."""

    takes: ClassVar[type] = Rollout
    """The class of batch that it learns from."""

    learns_from_replay: ClassVar[bool] = False
    """Whether its batches may contain replayed columns, chosen by policies of long ago. With a
    recurrent network `losses` then returns the `final_state` that `unroll` found."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the extras of acting that its batches must contain."""

    corrects_lag: ClassVar[bool] = False
    """Whether its returns are corrected for actions of older policies, as V-trace does."""

    mode: ClassVar[Mode] = "sample"
    """The mode in which actions are chosen during training."""

    separable: ClassVar[bool] = False
    """Whether the columns of a batch are independent, except for the sum or mean over all steps.
    The learner may then compute slices of some columns, in several threads, if the actor is
    separable too."""

    reduction: ClassVar[Reduction] = "sum"
    """How terms combine steps, so that the losses of slices can be added up exactly."""

    minimised_by: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The name of the optimiser that minimises each term; by default the only optimiser. An
    optimiser sees only the gradients of its own terms with respect to its own parameters."""

    actor: Actor
    models: dict[str, nn.Module]
    """Models by name; "actor" is the one that acts, whose weights are published."""
    optimisers: dict[str, Optimizer]
    """Optimisers by name."""
    counters: Counters
    """Counts of the run before the present update, for schedules; OptimiserStep keeps them."""

    def __init__(self, actor: Actor, config: Any) -> None:
        """Makes an algorithm without optimisers; config: an instance of Config.

        Raises the errors of `check_actor`.
        """
        self.check_actor(actor, config)
        self.actor = actor
        self.config = config
        self.models = {"actor": actor}
        self.optimisers = {}
        self.counters = Counters()

    @classmethod
    def create_factory(cls, **hyperparameters: Any) -> AlgoFactory:
        """Returns what makes this algorithm with these hyperparameters, wherever it learns.

        They are the fields of its Config and of StepConfig, with their defaults; `lr`, `gamma`,
        `entropy_coef`, `value_loss_coef`, `max_grad_norm`, `eps`, `tau` and `initial_alpha` are
        other names of some. Raises TypeError for an unknown name, and ValueError for a value out of
        range.
        """
        from torchbeast.core.algos.factory import algo_factory

        return algo_factory(cls, hyperparameters)

    @classmethod
    def check_actor(cls, actor: Actor, config: Any) -> None:
        """Raises UsageError when the actor is not an `actor_type`.

        Algorithms may add checks: the message of a UsageError is reported at the start of the run,
        without a traceback.
        """
        if not isinstance(actor, cls.actor_type):
            raise UsageError(
                f"{cls.__name__} needs a network of type {cls.actor_type.__name__}, got "
                f"{type(actor).__name__}: use another --model"
            )

    def observe(self, batch: BatchT) -> None:
        """Counts the batch in running statistics, here in those of the actor.

        Called once per batch, before `prepare`, without a gradient graph. Several learners join the
        statistics of every RunningNorm of their models.
        """
        new = batch.new_observations()
        if all(leaf.shape[1] for leaf in flatten(new)):  # a mask may leave none
            self.actor.observe(new)

    def prepare(self, batch: BatchT) -> BatchT:
        """Returns the batch to learn from, for example with advantages.

        Called once per batch, without a gradient graph.
        """
        return batch

    def metrics(self, batch: BatchT) -> Mapping[str, Tensor | Mean]:
        """Returns metrics of a whole batch that is prepared, beside those of `losses`.

        Called before the first optimiser step, without a gradient graph.
        """
        return {}

    def minibatches(self, batch: BatchT) -> Iterable[BatchT]:
        """Returns the minibatches, one for each optimiser step; at least one.

        The default is the whole batch, once. Each of an iterator is made after the step before it.
        Learners that take their steps together must get equally many.
        """
        return [batch]

    def stops_after(self, figures: Mapping[str, float]) -> bool:
        """Returns whether the rest of the minibatches is left out, after one with these figures:
        terms, metrics and gradient norms, computed before its optimiser step.

        Learners that take their steps together all get the figures of all of them: decide by these
        alone, so that all decide alike.
        """
        return False

    @abstractmethod
    def losses(self, minibatch: BatchT) -> Losses:
        """Returns the terms to minimise, and metrics.

        If `separable`, it is called with slices of a minibatch, by several threads at once.
        """

    def after_step(self) -> None:
        """Runs after every optimiser step, without a graph: target networks, temperatures."""
