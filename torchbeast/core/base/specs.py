# SPDX-License-Identifier: Apache-2.0
"""Specs, from which another process makes the same environment or network.

    Spec("my_module:make", {"size": 8}) -- as_json() --> process -- from_json() --> make(size=8)

A spec is a name, either a built-in one or "module:attribute", and keyword arguments, all JSON. A
callable that cannot be imported by name, such as a lambda or a function of a notebook, is pickled.

Unpickling can run any code. So pickled callables are only sent from a process to its own children,
which read them with `from_parent`. Specs in files, checkpoints and messages of peers are read with
`from_json`, which refuses pickled callables.

The name in a spec still decides which module of the user's own path is imported and so run. The
attribute is then called:

* for an environment with recorded keyword arguments only when the command line names it, see
  `run.config.check_named`; else with none;
* for a network with the spaces, and with keyword arguments only if it is a subclass of Actor;
* for an algorithm only if it is a subclass of Algorithm;
* for a schedule with the share of the steps that are done.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import operator
import pickle
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Literal, TypeVar

from torchbeast.core.base.checks import did_you_mean, setting, short_repr
from torchbeast.errors import UsageError

Precision = Literal["auto", "float32", "bfloat16"]
"""Precision of features; everything else is float32. auto: bfloat16 if the hardware supports it."""

RewardClipping = Literal["abs_one", "none"]
"""Treatment of rewards. abs_one: clipped to [-1, 1]. none: as the environment gave them."""


AnySpec = TypeVar("AnySpec", bound="Spec")


class SpecError(UsageError):
    """A spec that cannot be used."""


@dataclass(frozen=True)
class Spec:
    """A callable and its keyword arguments.

    Keyword arguments are converted to JSON and back (a tuple becomes a list), so that the callable
    gets the same arguments here and in another process.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # The callable in base64, if it cannot be imported by name.
    pickled: str = field(default="", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        try:
            kwargs = json.loads(json.dumps(dict(self.kwargs)))
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"{self.name}: keyword arguments must be JSON (numbers, strings, true, false, "
                f"null, lists, objects), got {self.kwargs!r}: {error}"
            ) from None
        object.__setattr__(self, "kwargs", kwargs)

    @classmethod
    def of(
        cls: type[AnySpec],
        source: str | Callable[..., Any],
        kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> AnySpec:
        """Makes the spec of a name, or of a callable, pickled if it cannot be imported by name.

        fields: further fields of the class. Raises SpecError when the callable cannot be pickled.
        """
        if isinstance(source, str):
            return cls(source, kwargs or {}, **fields)
        if name := _importable_name(source):
            return cls(name, kwargs or {}, **fields)
        label = _label(source)
        return cls(label, kwargs or {}, pickled=_pickled(source, label), **fields)

    @classmethod
    def naming(
        cls: type[AnySpec], source: Callable[..., Any], kwargs: Mapping[str, Any] | None = None
    ) -> AnySpec:
        """Makes a spec that says what a callable is; nothing is pickled, so it may lead nowhere."""
        return cls(_importable_name(source) or _label(source), kwargs or {})

    @classmethod
    def from_parent(cls: type[AnySpec], value: Mapping[str, Any]) -> AnySpec:
        """Reads the JSON that the parent process sent.

        Never call it with JSON from elsewhere: `load` would run whatever code is pickled there.
        """
        return cls(**value)

    @classmethod
    def from_json(cls: type[AnySpec], value: Any) -> AnySpec:
        """Reads JSON from a file, a checkpoint or a peer.

        Raises SpecError unless it is the JSON of such a spec without a pickled callable.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise SpecError(f"a spec must be a JSON object with a name, got {value!r}")
        if value.get("pickled"):
            raise SpecError(
                f"{value['name']}: a pickled callable is only accepted from the parent process; "
                "put it in a module and give it as my_module:name"
            )
        try:
            return cls.from_parent(value)
        except TypeError as error:
            raise SpecError(f"{value!r} is not the JSON of a spec: {error}") from error

    def as_json(self) -> dict[str, Any]:
        """Returns JSON from which `from_parent` and `from_json` restore the spec."""
        return asdict(self)

    def load(self) -> Callable[..., Any]:
        """Imports or unpickles the callable; raises SpecError if there is none."""
        if not self.pickled:
            return find_callable(self.name)
        _cloudpickle(self.name)
        return pickle.loads(base64.b64decode(self.pickled))


@dataclass(frozen=True)
class ActorSpec(Spec):
    """A network: its name, keyword arguments of its class, and how it reads its inputs.

    Args:
        name: "auto", the name of a built-in network, or "my_module:MyNet".
        kwargs: Keyword arguments of the class, as JSON has them.
        use_lstm: Whether it has an LSTM.
        reward_input: The form of its reward input, see Actor.transform_reward.
        reads_values: Whether it encodes observations by the value ranges of their space. False: by
            dtype and shape alone, for servers that do not describe the ranges.
    """

    use_lstm: bool = field(default=False, kw_only=True)
    reward_input: RewardClipping = field(default="abs_one", kw_only=True)
    reads_values: bool = field(default=True, kw_only=True)
    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        if ":" not in self.name and not self.pickled:  # built-in networks, typed in any case
            object.__setattr__(self, "name", self.name.lower())


def find_callable(name: str) -> Callable[..., Any]:
    """Returns the callable "package.module:attribute"; raises SpecError if there is none."""
    module_name, _, attribute = name.partition(":")
    module = import_module(module_name, name)
    try:
        value = operator.attrgetter(attribute)(module)
    except AttributeError:
        hint = did_you_mean(attribute, dir(module))
        raise SpecError(f"{name}: the module {module_name} has no {attribute!r}{hint}") from None
    if not callable(value):
        raise SpecError(f"{name}: {attribute} is {value!r}, expected a function or class")
    return value


def import_module(module_name: str, wanted: str) -> ModuleType:
    """Imports a module; raises SpecError, which names `wanted`, when there is none."""
    if not module_name or module_name.startswith("."):
        raise SpecError(f"{wanted}: {module_name!r} is not the name of a module")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = "install it, or start the program in its folder"
        if module_name.endswith(".py"):
            advice = f"remove .py: {wanted.replace('.py:', ':')}"
        raise SpecError(f"{wanted}: there is no module {error.name}; {advice}") from error


def check_takes(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    name: str,
    *,
    positional: int = 0,
    ours: Collection[str] = (),
    also: Collection[str] = (),
) -> None:
    """Raises SpecError unless `function` takes these keyword arguments.

    name: names the function in the message. positional: number of arguments that the caller passes
    by position. ours: arguments that it passes by name. also: further names that are allowed.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[positional:]
    except (TypeError, ValueError):  # written in C: the call itself will fail
        return
    signature = inspect.Signature([p for p in parameters if p.name not in ours])
    try:
        signature.bind(**{key: value for key, value in kwargs.items() if key not in also})
    except TypeError as error:
        takes = ", ".join(map(repr, [*signature.parameters, *also])) or "nothing"
        raise SpecError(f"{name}: {error}; it takes {takes}, got {values_in(kwargs)}") from None


def check_kwarg(holds: bool, name: str, expected: str, value: object) -> None:
    """Raises SpecError unless a keyword argument of a model is as expected."""
    if not holds:
        raise SpecError(
            f"the model's keyword argument {name} must be {expected}, got {json.dumps(value)}"
        )


def check_count(name: str, value: object) -> None:
    """Raises SpecError unless a keyword argument of a model can be a number of units or layers."""
    is_count = type(value) is int and value >= 1  # True is an int too
    check_kwarg(is_count, name, "a whole number, at least 1", value)


def values_in(kwargs: Mapping[str, Any]) -> str:
    """Formats keyword arguments as "hidden=64, depth=2"; "none" without any."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in kwargs.items()) or "none"


def _label(source: Callable[..., Any]) -> str:
    """Returns a name that nothing built-in has, the same in every process, and without commas,
    which separate the tasks of one agent.
    """
    name = getattr(source, "__qualname__", re.sub(r" at 0x\w+", "", repr(source)))
    return f"{getattr(source, '__module__', '')}:{name}".replace(",", ";")


def _importable_name(source: Callable[..., Any]) -> str:
    """Returns the "module:attribute" by which other processes can import source, or ""."""
    module, attribute = getattr(source, "__module__", None), getattr(source, "__qualname__", "")
    if module in (None, "__main__") or not attribute:  # a child's __main__ is another module
        return ""
    name = f"{module}:{attribute}"
    try:
        return name if find_callable(name) is source else ""
    except SpecError:  # a lambda, or defined inside a function
        return ""


def _pickled(source: Callable[..., Any], label: str) -> str:
    try:
        data: bytes = _cloudpickle(label).dumps(source)
    except (TypeError, pickle.PicklingError) as error:
        raise SpecError(f"{label} cannot be sent to another process: {error}") from error
    return base64.b64encode(data).decode()


def _cloudpickle(label: str) -> Any:
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise SpecError(
            f"{label} cannot be imported by name, and sending it to another process needs "
            "cloudpickle: pip install 'torchbeast[cloudpickle]', or put it in a module and give it "
            "as my_module:name"
        ) from None
    return cloudpickle


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The neural network."""

    model: str = setting("auto", "agent")
    """Architecture: deep (the ResNet of IMPALA), fixup (that ResNet with Fixup initialisation),
    shallow (the AtariNet of TorchBeast 2019, 3x faster than deep), shallow-norm (AtariNet with
    standardised images and orthogonal initialisation, which learns Pong in fewer steps than
    shallow), small (one convolution), mlp, or my_module:MyNet. auto selects deep (PolyBeast) or
    shallow (other programs) for images, small for images below 36 pixels and grids of categories,
    and mlp for vectors."""
    use_lstm: bool = setting(False, "agent")
    """Make the network recurrent, with an LSTM by default. For a GRU or a gated transformer-XL,
    also pass --model_kwargs '{"core": "gru"}' or '{"core": "gtrxl", "core_length": 100}'. Use it if
    one observation does not show the state of the environment. Recurrent networks are slower."""
    shared_body: bool | None = setting(None, "agent")
    """Share all layers below the heads between policy and value function, in actor-critic
    algorithms. Default: true, except for PPO with an mlp that is not recurrent."""
    model_kwargs: Mapping[str, Any] = setting(dict, "agent")
    """Keyword arguments of the network's constructor as JSON. The built-in networks take hidden,
    core (lstm, gru or gtrxl), core_layers, core_length (steps that a gtrxl remembers), norm,
    activation (relu or tanh), orthogonal, state_deviation and initial_deviation, as in '{"hidden":
    128, "core": "gru", "norm": true}' (norm adds a LayerNorm to the joint layer) or, to undo PPO's
    changes, '{"orthogonal": false, "state_deviation": true}'. Default: none; with --mode test, the
    run's arguments."""

    @property
    def spec(self) -> ActorSpec:
        """The spec of the network."""
        return ActorSpec(self.model, kwargs_of(vars(self)), use_lstm=self.use_lstm)


def kwargs_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of the network that flags, or a record of them, give."""
    shared = flags.get("shared_body")
    return {**flags.get("model_kwargs", {}), **({} if shared is None else {"shared_body": shared})}
