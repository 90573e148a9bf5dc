# SPDX-License-Identifier: Apache-2.0
"""The base class of algorithms: what differs between them. `OptimiserStep` is what they share.

    batch -- prepare --> batch -- minibatches --> minibatch -- losses --> terms, metrics
                           |                      one optimiser step each, then after_step,
                        metrics                   until there are no more or stops_after
                                                  ... --> schedule

Several learners may train one model. Each runs `observe`, `prepare`, `metrics`, `minibatches` and
`losses` on its own batch, perhaps in another process than the one that applies the gradients, and
all keep the same buffers. So each buffer of a model has one method that may change it:

    RunningNorm       observe, which several learners join
    by the counters   schedule, for example the probability of random actions
    by the weights    after_step, for example a target network

Parameters that no optimiser trains may change where the weights do: in `adapt`, by the metrics that
all learners found together, for example PopArt's statistics.

Changes in `prepare` or `losses` are allowed with one learner and refused with several.

An algorithm is a file: a Config, which becomes its flags, and a class that defines `losses`. Its
hyperparameters are the fields of its Config, with the fields of nested Configs, and of StepConfig.
Each has the name of its flag, and some also have the name that is usual in implementations of PPO.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor, ActorCritic, Mode
from torchbeast.core.algos.config import (
    OTHER_NAMES,
    StepConfig,
    check_recorded,
    recorded,
    settings_of,
    usual_of,
    with_values,
)
from torchbeast.core.base.checks import one_of, signed
from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.tasks import without_task
from torchbeast.core.losses import Mean, Reduction
from torchbeast.core.storages.batch import NO_FEEDBACK, Batch, Feedback
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError


@dataclass
class Counters:
    """Counts from the start of the run, across restarts.

    Attributes:
        env_steps: Collected environment steps; they determine the learning rate and the run's end.
        learnt_steps: Steps used in updates; a step that is used twice counts twice.
        optimiser_steps: Changes of the weights.
        version: Updates, one per batch. Each publishes the weights under this number.
        schedule_starts: Environment steps at which schedules began, by setting, unless they began
            with the run.
    """

    env_steps: int = 0
    learnt_steps: int = 0
    optimiser_steps: int = 0
    version: int = 0
    schedule_starts: dict[str, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters under the names used by all checkpoints."""
        state = asdict(self)
        return {"steps": state.pop("env_steps"), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; raises ValueError for TorchBeast 2019's, which lacks counters."""
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(
                f"the checkpoint's scheduler_state_dict lacks {', '.join(sorted(missing))}: it was "
                "written by another program, and can be tested but not resumed"
            )
        self.env_steps, self.version = int(state["steps"]), int(state["version"])
        self.learnt_steps = int(state["learnt_steps"])
        self.optimiser_steps = int(state["optimiser_steps"])
        self.schedule_starts = dict(state["schedule_starts"])


BatchT = TypeVar("BatchT", bound=Batch)


class Optimizer(Protocol):
    """An optimiser of torch.optim, or an object with the same methods."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None:
        """Clears the gradients."""

    def step(self) -> Any:
        """Updates the parameters by their gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next step depends on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state_dict."""


class Losses(NamedTuple):
    """The losses and metrics of a minibatch.

    Attributes:
        terms: Weighted losses by name: scalars, whose sum is minimised.
        metrics: Numbers that are logged but never minimised: scalars, each a mean over all valid
            steps, or the `losses.mean` of some of them. A mean over no steps is not logged.
        feedback: Results for the replay: `priorities` if the minibatch has `weights`, and
            `final_state` if it `feeds_back`.

    Example:
        ```python
        return Losses({"pg_loss": pg_loss, "value_loss": 0.5 * value_loss}, {"entropy": entropy})
        ```
    """

    terms: dict[str, Tensor]
    metrics: Mapping[str, Tensor | Mean] = MappingProxyType({})
    feedback: Feedback = NO_FEEDBACK


class Algorithm(ABC, Generic[BatchT]):
    """Base class of reinforcement-learning algorithms: losses of models, and their optimisers.

    Subclasses define `losses`, and the class attributes below where the default does not fit. All
    state that the next step depends on is in `models`, including their buffers, or in `optimisers`:
    checkpoints contain both.

    Attributes:
        Config: A frozen keyword-only dataclass with a default for every field. The fields become
            the algorithm's flags, and the strings under them the help texts. Its class attribute
            `usual: ClassVar[Mapping[str, Any]]` holds the algorithm's defaults of other flags, such
            as {"num_envs": 8, "grad_norm_clipping": 0.5}.
        actor_type: The class of actor that the algorithm trains.
        family: The family of built-in networks that `--model` chooses from: with "q", mlp means
            q-mlp. Default: the actor-critics.
        network: Keyword arguments of the built-in networks, unless others are given.
        takes: The class of batch that the algorithm trains on, Rollout or Transitions.
        learns_from_replay: Whether batches may contain replayed columns, whose actions were chosen
            by much older policies. With a recurrent network, `losses` then returns the
            `final_state` that `unroll` found.
        burns_in: Whether replayed rollouts begin anywhere, with a recurrent state among the extras,
            and are sampled by priority. `losses` then returns priorities if there are weights.
        n_step: Steps of n-step returns, for algorithms on rollouts. The program sets it.
        needs: Names of the extra outputs of acting that batches must contain.
        corrects_lag: Whether returns are corrected for actions of older policies, as V-trace does.
        mode: The mode in which actions are chosen during training.
        separable: Whether the columns of a batch are independent except for the sum or mean over
            all steps. If the actor is separable too, several threads may compute slices of the
            columns.
        reduction: "sum" or "mean": how terms combine steps, so that losses of slices add up
            exactly.
        minimised_by: The name of the optimiser that minimises each term. Default: the only one. An
            optimiser sees only the gradients of its terms with respect to its parameters.
        actor: The network that acts.
        config: The hyperparameters. A setting with a schedule has its value for the next update;
            see `core/algos/config.py`.
        models: Models by name. "actor" is the one that acts, and whose weights are published.
        optimisers: Optimisers by name.
        counters: Counts of the run before the present update, for schedules. OptimiserStep keeps
            them.

    Example:
        ```python
        class MyAlgorithm(Algorithm[Rollout]):
            Config = MyConfig

            def __init__(self, actor, config):
                super().__init__(actor, config)
                self.optimisers = {"actor": config.optimiser.make(actor.parameters())}

            def losses(self, minibatch):
                return Losses({"loss": ...})
        ```
    """

    Config: ClassVar[type]

    actor_type: ClassVar[type[Actor]] = ActorCritic  # type: ignore[type-abstract]

    family: ClassVar[str] = ""

    network: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    takes: ClassVar[type] = Rollout

    learns_from_replay: ClassVar[bool] = False

    burns_in: ClassVar[bool] = False

    n_step: int = 1

    needs: ClassVar[tuple[str, ...]] = ()

    corrects_lag: ClassVar[bool] = False

    mode: Mode = "sample"

    separable: ClassVar[bool] = False

    reduction: ClassVar[Reduction] = "sum"

    minimised_by: ClassVar[Mapping[str, str]] = MappingProxyType({})

    actor: Actor
    models: dict[str, nn.Module]
    optimisers: dict[str, Optimizer]
    counters: Counters

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        one_of(get_args(Reduction), **{f"{cls.__name__}.reduction": cls.reduction})
        one_of(get_args(Mode), **{f"{cls.__name__}.mode": cls.mode})

    def __init__(self, actor: Actor, config: Any) -> None:
        """Makes an algorithm without optimisers.

        Args:
            actor: The network to train.
            config: The hyperparameters, an instance of `Config`.

        Raises:
            UsageError: If the algorithm cannot train this actor; see `check_actor`.
        """
        self.check_actor(actor, config)
        self.actor = actor
        self.config = config
        self.models = {"actor": actor}
        self.optimisers = {}
        self.counters = Counters()
        if getattr(config, "epsilon_ladder", False):
            self.mode = "ladder"

    @signed(lambda algo: _hyperparameters(algo))
    @classmethod
    def create_factory(cls, **hyperparameters: Any) -> AlgoFactory:
        """Returns a factory that makes this algorithm with these hyperparameters on any machine.

        Args:
            **hyperparameters: Fields of the algorithm's Config and of StepConfig; the signature
                lists them with their defaults. Names such as `lr`, `gamma` and `tau` are other
                names for some of them.

        Returns:
            The `algo_factory` of a Scheme.

        Raises:
            TypeError: For an unknown name, or a name given twice.
            ValueError: For a value out of range, or one that a checkpoint cannot hold.

        Example:
            ```python
            PPO.create_factory(learning_rate=1e-3, num_epochs=10, grad_norm_clipping=0.5)
            ```
        """
        config, step = cls.Config(), _step_of(cls.Config)
        named = _by_flag(cls.__name__, hyperparameters, recorded(config) | recorded(step))
        config = with_values(config, named, check=True)
        step = with_values(step, named, check=True)
        check_recorded(recorded(config), f"{cls.__name__}.create_factory: ")
        return AlgoFactory(algo=cls, config=config, step=step, given=frozenset(named))

    @classmethod
    def check_actor(cls, actor: Actor, config: Any) -> None:
        """Checks that the algorithm can train an actor. Subclasses may add checks.

        Args:
            actor: The network to train.
            config: The hyperparameters, an instance of `Config`.

        Raises:
            UsageError: If it cannot. The programs print the message when the run starts, without a
                traceback.
        """
        if not isinstance(actor, cls.actor_type):
            raise UsageError(
                f"{cls.__name__} needs a network of type {cls.actor_type.__name__}, got "
                f"{type(actor).__name__}: use another model"
            )

    def observe(self, batch: BatchT) -> None:
        """Adds the batch to running statistics, by default to the actor's.

        It is called once per batch, before `prepare`, without a gradient graph. With several
        learners, the statistics of every RunningNorm of their models are joined.
        """
        new = without_task(batch.new_observations())
        if all(leaf.shape[1] for leaf in flatten(new)):  # a mask may leave none
            self.actor.observe(new)

    def prepare(self, batch: BatchT) -> BatchT:
        """Returns the batch to train on, for example with advantages added to its extras.

        It is called once per batch, without a gradient graph. It reads the models' buffers, but
        other methods change them: see the module.
        """
        return batch

    def metrics(self, batch: BatchT) -> Mapping[str, Tensor | Mean]:
        """Returns metrics of a whole prepared batch, which join the metrics of `losses`.

        It is called before the first optimiser step, without a gradient graph.
        """
        return {}

    def minibatches(self, batch: BatchT) -> Iterable[BatchT]:
        """Returns the minibatches, one for each optimiser step and at least one.

        The default is the whole batch, once. An iterator makes each minibatch after the optimiser
        step before it. Learners that update together need the same number of minibatches.
        """
        return [batch]

    def stops_after(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether to skip the remaining minibatches of a batch, after one with steps.

        Args:
            metrics: Terms, metrics and gradient norms of the present minibatch, computed before its
                optimiser step. Learners that update together get the same metrics: decide by these
                alone, so that all of them decide alike.
        """
        return False

    @abstractmethod
    def losses(self, minibatch: BatchT) -> Losses:
        """Returns the terms to minimise, and metrics.

        If the algorithm is `separable`, several threads call this method with slices of a minibatch
        at the same time.
        """

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Changes models by the metrics of a minibatch after its optimiser step, without a graph.

        It runs before `after_step`, where the gradients are applied.

        Args:
            metrics: As in `stops_after`, joined over slices and learners.
        """

    def after_step(self) -> None:
        """Updates target networks, temperatures and the like after every optimiser step, without a
        graph. It runs where the gradients are applied, which may be a process without batches.
        """

    def schedule(self) -> Mapping[str, float]:
        """Sets the models' buffers that depend on `counters`; returns numbers to log.

        It is called at the start and after every update, without a gradient graph, in every learner
        and in the process that applies their gradients. It may be called several times with the
        same counters, so compute values from the counters alone.
        """
        return {}


def check_scalars(algo: Algorithm[Any], losses: Losses) -> None:
    """Raises ValueError for a term or metric with a value for each step, which would be summed, and
    for a term without a gradient or an optimiser, which would be ignored.
    """
    for name, value in {**losses.terms, **losses.metrics}.items():
        if not isinstance(value, Tensor | Mean):
            raise ValueError(
                f"{type(algo).__name__}.losses: {name} must be a tensor, got {value!r}: return a "
                "scalar tensor, without item()"
            )
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(
                f"{type(algo).__name__}.losses: {name} must be a scalar, got shape "
                f"{list(value.shape)}: take the sum, or losses.mean(values, mask) of a metric"
            )
    groups = [group for optimiser in algo.optimisers.values() for group in optimiser.param_groups]
    # A term may depend on a parameter alone that is frozen.
    has_frozen = not all(p.requires_grad for group in groups for p in group["params"])
    for name, term in losses.terms.items():
        if len(algo.optimisers) > 1 and algo.minimised_by.get(name) not in algo.optimisers:
            raise ValueError(
                f"{type(algo).__name__}.losses: no optimiser minimises {name}: name one of "
                f"{', '.join(algo.optimisers)} for it in minimised_by"
            )
        if not (term.requires_grad or has_frozen):
            raise ValueError(
                f"{type(algo).__name__}.losses: {name} depends on no parameter: compute it "
                "without detach() and no_grad()"
            )


@dataclass(frozen=True, kw_only=True)
class AlgoFactory:
    """Makes an algorithm for an actor; see Algorithm.create_factory.

    Attributes:
        algo: The class of the algorithm.
        config: Its hyperparameters, an instance of `algo.Config`.
        step: The limits of an optimiser step.
        given: Names of the hyperparameters that the caller gave.
    """

    algo: type[Algorithm[Any]]
    config: Any
    step: StepConfig
    given: frozenset[str]

    def __call__(self, device: torch.device | str, actor: Actor) -> Algorithm[Any]:
        """Makes the algorithm, with the actor moved to the device."""
        return self.algo(actor.to(device), self.config)

    def __repr__(self) -> str:
        values = recorded(self.config) | recorded(self.step)
        told = [f"{name}={values[name]!r}" for name in values if name in self.given]
        return f"{self.algo.__name__}.create_factory({', '.join(told)})"

    def replaced(self, **hyperparameters: Any) -> AlgoFactory:
        """Returns this factory with other values of hyperparameters of the algorithm's Config."""
        config = with_values(self.config, hyperparameters, check=True)
        return replace(self, config=config, given=self.given | {*hyperparameters})


def _hyperparameters(algo: type[Algorithm[Any]]) -> dict[str, tuple[Any, Any]]:
    """Returns the annotation and the default of every hyperparameter by its names."""
    config = getattr(algo, "Config", StepConfig)
    settings = {**settings_of(config()), **settings_of(_step_of(config))}
    others = {name: settings[flag] for name, flag in OTHER_NAMES.items() if flag in settings}
    return {**settings, **others, **settings}  # a setting's own name comes first


def _step_of(config: type) -> StepConfig:
    """Returns the limits of an optimiser step that are usual for the algorithm of this Config."""
    return with_values(StepConfig(), usual_of(config), check=True)


def _by_flag(
    owner: str, hyperparameters: Mapping[str, Any], flags: Collection[str]
) -> dict[str, Any]:
    """Returns the hyperparameters by the names of flags; raises TypeError for one given twice."""
    named: dict[str, Any] = {}
    for name, value in hyperparameters.items():
        flag = name if name in flags else OTHER_NAMES[name]
        if flag in named:
            both = [given for given in hyperparameters if OTHER_NAMES.get(given, given) == flag]
            raise TypeError(f"{owner}.create_factory: {' and '.join(both)} are the same: use one")
        named[flag] = value
    return named
