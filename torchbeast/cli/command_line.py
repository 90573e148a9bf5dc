# SPDX-License-Identifier: Apache-2.0
"""Parses the command line into frozen dataclasses, and reports errors in one line.

The flags of a program are a dataclass whose fields are groups of flags, which are dataclasses too.
On the command line they are flat: `--num_envs 10`, not `--fleet.num_envs 10`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from functools import cache, partial
from itertools import dropwhile, pairwise, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from torchbeast import zoo
from torchbeast.cli import resuming
from torchbeast.cli.learner_flags import LearnerFlags
from torchbeast.cli.resuming import kinds
from torchbeast.collect.config import ActorsConfig, usual_batch_size
from torchbeast.core.algos.config import (
    OTHER_NAMES,
    SHAPES,
    Shape,
    check_recorded,
    recorded,
    usual_of,
    with_values,
)
from torchbeast.core.algos.registry import ALGOS, DEFAULT, FOR_REPLAY, config_of, spelt
from torchbeast.core.base.checks import names_with
from torchbeast.core.base.specs import SpecError
from torchbeast.envs.spec import is_pool
from torchbeast.errors import (
    COLOURS,
    EXIT_DONE,
    RunError,
    UsageError,
    exit_code_of,
    expanded,
    refusing_paths,
    what_it_raised,
)
from torchbeast.reporting.output import lossy_output

KWARGS = Mapping[str, Any]
"""The type of a field whose flag is a JSON object."""

flatten = recorded  # the value of every flag by its name on the command line, without groups

SWITCH = bool | None
"""The type of a field whose flag is on, off, or left to the program, which is its default."""

REGISTRY = ConstructorRegistry()
"""Tells tyro how to read and show these flags."""

Flags = TypeVar("Flags")
OfLearner = TypeVar("OfLearner", bound=LearnerFlags)

_BOX = "╭╮╰╯│─ "
_SWITCHED = {"true": True, "false": False}
TITLES = {  # of groups of flags in --help, where it is not the name of the field
    "checkpoints": "checkpoint",
    "command": "mode",
    "defaults": "algorithm and preset",
    "logs": "log",
    "model": "network",
    "processes": "worker",
    "rollouts": "batch",
    "step": "update",
    "transitions": "off-policy sampling",
}
_OF_REPLAY = ("replay_size", "replay_ratio", "replay_kl_threshold")
# Other names of flags: of TorchBeast 2019, of other programs and of other libraries.
_ALIASES = {
    **OTHER_NAMES,
    "num_actors": "num_envs",
    "num_threads": "num_learner_threads",
    "use_resnet": "model=deep",
    "num_workers": "num_servers",
    "num_servers": "num_workers",
    "env_id": "env",
    "n_envs": "num_envs",
    "num_steps": "unroll_length",
    "buffer_size": "replay_size",
    "learning_starts": "learn_start",
    "total_timesteps": "total_steps",
    "lambda": "gae_lambda",
}
_OF_NETWORKS = (
    "activation",
    "core",
    "hidden",
    "initial_deviation",
    "norm",
    "orthogonal",
    "core_layers",
    "core_length",
    "state_deviation",
)
# What to type in place of flags of other libraries that mean something else, or take other values.
_SUGGESTED = {
    **{name: f"model_kwargs '{{\"{name}\": ...}}'" for name in _OF_NETWORKS},
    "anneal_lr": "learning_rate_schedule",
    "capture_video": "mode test_render",
    "cuda": "device",
    "exp_name": "xpid",
    "exploration_fraction": "exploration_steps",
    "n_steps": "unroll_length",
    "net_arch": "model_kwargs",
    "policy_kwargs": "model_kwargs",
    "target_network_frequency": "target_period",
    "target_update_interval": "target_period",
    "track": "wandb_project",
    "train_freq": "replay_ratio",
    "train_frequency": "replay_ratio",
    "vf_coef": "baseline_cost",
    "wandb_project_name": "wandb_project",
}
_SIMILAR = 0.7  # least similarity, from 0 to 1, for which a flag is suggested


def main(
    flags_type: type[Flags], program: str, args: Sequence[str] | None, run: Callable[[Flags], int]
) -> int:
    """Parses the flags in `args` and runs a program with them.

    Returns the exit code: 0 if it is done or was stopped, 1 if it failed, 2 for wrong usage.
    """
    return exit_code_of(program, lambda: run_with(parse(flags_type, program, args), run))


def run_with(flags: Flags, run: Callable[[Flags], int]) -> int:
    """Runs a program; in its UsageErrors, names of fields are replaced by flags."""
    try:
        return run(flags)
    except UsageError as error:
        raise UsageError(as_typed(str(error), type(flags))) from error


def parse(
    flags_type: type[Flags], program: str, args: Sequence[str] | None, known: Sequence[str] = ()
) -> Flags:
    """Parses the flags in `args` (None: sys.argv); raises UsageError if they are wrong.

    known: names of further flags, which were read before, as suggestions for an unknown flag.
    `--help` and `--preset help` print and exit.
    """
    with _as_far_as_it_is_read():
        flags_type, default = _read_first(flags_type, _words(args, flags_type))
        words = _words(args, flags_type)  # includes the algorithm's own flags
        parsed, unknown = _cli(flags_type, program, words, default)
    if unknown:
        raise UsageError(_about_unknown(unknown, [*flag_names(flags_type), *known]))
    if isinstance(parsed, LearnerFlags):
        _check_replay(parsed, words)
        check_recorded(flatten(parsed.algorithm), "--")
    return parsed


def parse_known(
    flags_type: type[Flags], program: str, args: Sequence[str] | None
) -> tuple[Flags, list[str]]:
    """Parses the flags that the type has; returns them and the remaining words, for another
    program.
    """
    with _as_far_as_it_is_read():
        return _cli(flags_type, program, _words(args, flags_type), tyro.MISSING_NONPROP)


def _words(args: Sequence[str] | None, flags_type: type) -> list[str]:
    """Returns the words of the command line, with flags by their own names."""
    known = flag_names(flags_type)
    return [by_its_name(word, known) for word in (sys.argv[1:] if args is None else args)]


def _cli(
    flags_type: type[Flags], program: str, words: Sequence[str], default: Any
) -> tuple[Flags, list[str]]:
    """Parses the words with tyro; returns the flags, and the words that are not flags.

    Raises UsageError, in place of tyro's box on stderr, if they are wrong.
    """
    shown = io.StringIO()
    try:
        with redirect_stderr(shown), redirect_stdout(cast(TextIO, _Wrapping(sys.stdout))):
            return tyro.cli(
                flags_type,
                prog=f"python -m torchbeast.{program}",
                args=list(_with_values(words, flags_type)),
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
                registry=REGISTRY,
            )
    except _CheckFailed as failed:
        message = as_typed(str(failed), flags_type)
    except SystemExit as end:
        if end.code != 2:
            raise
        message = _first_sentence(shown.getvalue())
    raise UsageError(f"{message.removesuffix('.')}. See --help.")


class _Wrapping:
    """Wraps lines that are too long for the terminal: tyro's usage and description of a program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, shutil.get_terminal_size().columns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes one or more lines."""
        return self._stream.write("\n".join(map(self._wrapped, text.split("\n"))))

    def _wrapped(self, line: str) -> str:
        plain = COLOURS.sub("", line)
        is_short = len(plain) <= self._width
        return line if is_short else textwrap.fill(plain, self._width, break_on_hyphens=False)


@contextmanager
def _as_far_as_it_is_read() -> Iterator[None]:
    """Ends the program normally if the reader of its help stops early, for example `head`."""
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again
        raise SystemExit(EXIT_DONE) from None


def by_its_name(word: str, known: Collection[str]) -> str:
    """Replaces another name of a flag by the flag's own: with dashes (--learning-rate), in American
    spelling (--optimizer), or as TorchBeast 2019 or other libraries call it (--num_actors, --lr).

    word: a word of the command line; other words stay as they are. known: the names of the flags.
    """
    flag, equals, value = word.partition("=")
    if not flag.startswith("--"):
        return word
    name = flag[2:].replace("-", "_")
    no = "no_" if name.startswith("no_") and name not in known else ""
    name = name.removeprefix(no)
    alias = _ALIASES.get(name, "")
    others = name.replace("ize", "ise"), alias, _ALIASES.get(alias, "")
    meant = [other for other in others if other.partition("=")[0] in known]
    return f"--{no}{meant[0] if meant and name not in known else name}{equals}{value}"


def _with_values(words: Sequence[str], flags_type: type) -> Iterator[str]:
    """Yields the words, with a value for --name and --no_name where a flag is true or false."""
    switches = {name for name, kind in kinds(flags_type) if kind in (bool, SWITCH)}
    for word, following in pairwise([*words, ""]):
        name = word.removeprefix("--") if word.startswith("--") else ""
        if name in switches and following.lower() not in _SWITCHED:
            yield f"{word}=true"
        elif name.startswith("no_") and name[3:] in switches:
            yield f"--{name[3:]}=false"
        else:
            yield word


def _read_first(flags_type: type[Flags], words: Sequence[str]) -> tuple[type[Flags], Any]:
    """Returns the type of the flags, including the flags of the algorithm, and their defaults.

    The defaults come from an earlier run and the preset, or else are the program's.
    """
    if not issubclass(flags_type, LearnerFlags):
        return flags_type, tyro.MISSING_NONPROP
    of_preset = zoo.chosen_settings(resuming.given(words, "--preset"))  # it may print and exit
    # The environment stays, because the servers must serve the environment of the preset.
    by_servers = names_with("served", flags_type) - {"env"}
    of_preset = _without(by_servers, of_preset)
    if ":" in (resuming.given(words, "--model") or ""):  # a class in place of the preset's network
        of_preset = _without({"model_kwargs", "shared_body"}, of_preset)
    # It may print where the settings of the run come from.
    with lossy_output(), refusing_paths("use another --savedir or --xpid"):
        recorded = resuming.recorded_settings(words)
    algo = _algorithm(words, {**recorded, **of_preset})
    resuming.check_algorithm(words, algo, recorded)
    complete_type = with_algorithm(flags_type, algo)
    chosen = {} if algo == DEFAULT else {"algo": algo}
    config = type(complete_type().algorithm)
    names_pool = is_pool(resuming.given(words, "--env") or "")
    in_pool = not of_preset and names_pool and not _fixes_lag(config, words)
    in_pool &= not any(resuming.given(words, flag) for flag in _BOUNDS)
    usual = {} if resuming.is_test(words) else usual_of(config, in_pool)
    of_run = resuming.usable(complete_type, recorded, words)
    values = {**_without(by_servers, usual), **of_run, **of_preset, **chosen}
    values = _with_followers(values, usual, words, flag_names(complete_type))
    resuming.check_environment(words, values, recorded)
    return complete_type, _with_usual_batch(with_values(complete_type(), values), values, words)


_BOUNDS = ("--num_buffers", "--num_workers", "--num_servers")  # of the number of environments


def _fixes_lag(config: type, words: Sequence[str]) -> bool:
    """Returns whether the command fixes the lag of an algorithm that usually has none."""
    is_typed = resuming.given(words, "--fixed_lag") not in (None, "None")
    return is_typed and "fixed_lag" not in usual_of(config)


def _with_usual_batch(
    flags: OfLearner, values: Mapping[str, Any], words: Sequence[str]
) -> OfLearner:
    """Returns the defaults with a batch size for the number of environments, unless `values` have
    one, or the lag is fixed.
    """
    started = [part for part in vars(flags).values() if isinstance(part, ActorsConfig)]
    if "batch_size" in values or not started:
        return flags
    with suppress(ValueError):  # a mistake, which is reported later
        actors, queue = _as_typed(started[0], words), math.inf
        if (size := resuming.given(words, "--max_learner_queue_size")) not in (None, "None"):
            queue = max(flags.rollouts.batch_size, _read_integer([size]))
        if getattr(actors, "fixed_lag", None) is None:
            usual = min(usual_batch_size(actors.environments()), queue)
            return with_values(flags, {"batch_size": usual})
    return flags


def _as_typed(actors: ActorsConfig, words: Sequence[str]) -> ActorsConfig:
    """Returns the settings with the numbers of a command; raises ValueError for a mistake."""
    numbers = {
        name: _read_integer_or_none([number])
        for name in ("num_envs", actors.of_processes, "num_buffers", "fixed_lag")
        if hasattr(actors, name) and (number := resuming.given(words, f"--{name}"))
    }
    return dataclasses.replace(actors, **numbers)


def _with_followers(
    values: Mapping[str, Any], usual: Mapping[str, Any], words: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    """Returns the defaults with the value of another flag in place of its name: an algorithm's
    usual batch_size may be "num_envs". names: of all flags.
    """
    following = dict(values)
    for name, other in usual.items():
        if other in names and following.get(name) == other:
            followed = resuming.given(words, f"--{other}") or str(following.get(other))
            del following[name]
            with suppress(ValueError):  # None, or a mistake that is reported later, such as 0
                following[name] = max(1, _read_integer([followed]))
    return following


def with_algorithm(flags_type: type[OfLearner], name: str) -> type[OfLearner]:
    """Returns the program's flags, including the flags of the algorithm.

    Raises UsageError if the algorithm does not exist, or its settings cannot be flags.
    """
    config = _config(name)
    if config is type(flags_type().algorithm):
        return flags_type
    _check_names(flags_type, name, config)
    complete_type: type[OfLearner] = dataclasses.make_dataclass(
        flags_type.__name__,
        [("algorithm", config, dataclasses.field(default_factory=config))],
        bases=(flags_type,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": flags_type.__doc__},
    )
    return complete_type


def _config(name: str) -> type:
    """Returns the Config of the algorithm.

    Raises UsageError if the algorithm does not exist, and RunError with the traceback if its code
    fails.
    """
    try:
        config = config_of(name)
        config()  # its defaults pass its checks
    except SpecError as error:
        raise UsageError(f"--algo: {error}") from error
    except Exception as error:
        raise RunError(f"the algorithm {name} failed: {what_it_raised(error)}") from error
    return config


def _check_names(flags_type: type[LearnerFlags], name: str, config: type) -> None:
    """Raises UsageError if a setting has the name of another setting or of another flag."""
    settings = Counter(flag_names(config))
    flags = {*flag_names(flags_type)} - {*flag_names(type(flags_type().algorithm))}
    if taken := sorted(n for n, count in settings.items() if count > 1 or n in flags):
        raise UsageError(
            f"--algo {name} has settings with the names of other settings or flags, "
            f"{', '.join(taken)}: rename them"
        )


def _without(names: Collection[str], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings that do not have these names."""
    return {name: value for name, value in settings.items() if name not in names}


def _algorithm(words: Sequence[str], decided: Mapping[str, Any]) -> str:
    """Returns the name of the algorithm whose flags the program has.

    It is LASER if there is a replay and no other algorithm is named. An evaluation does not need
    the recorded algorithm, which may not be importable.
    """
    of_run = {} if resuming.is_test(words) else decided
    usual = FOR_REPLAY if _has_replay(words, of_run) else DEFAULT
    return spelt(resuming.given(words, "--algo") or of_run.get("algo") or usual)


def _has_replay(words: Sequence[str], decided: Mapping[str, Any]) -> bool:
    """Returns whether a replay_size is recorded or preset, or a flag of replay is typed, not 0."""
    typed = [resuming.given(words, f"--{name}") for name in _OF_REPLAY]
    size = decided.get("replay_size", 0) if typed[0] is None else 0
    return bool(size) or any(text and text.strip("0.") for text in typed)


def _check_replay(flags: LearnerFlags, words: Sequence[str]) -> None:
    """Raises UsageError if a ratio or threshold is typed without a replay size.

    A Config cannot check this, because it cannot tell a typed default from an untyped one.
    """
    if flags.replay.replay_size:
        return
    for name in _OF_REPLAY[1:]:
        typed = resuming.given(words, f"--{name}")
        if typed is not None and not (name == "replay_ratio" and flags.replay.replay_ratio == 0):
            raise UsageError(f"--{name} needs a replay: set --replay_size too. See --help.")


def _about_unknown(words: Sequence[str], known: Sequence[str]) -> str:
    """Returns the error message for words that are not flags; known: the names of the flags."""
    names = [re.sub("^--(no_)?|=.*", "", word) for word in words if word.startswith("--")]
    meant = [f"--{text}" for name in names for text in _similar(name, known)]
    question = [f"Did you mean {' and '.join(meant)}?"] if meant else []
    of_others = _of_other_algorithms(names, known)
    sentences = [f"Unrecognized options: {', '.join(words)}.", *of_others, *question]
    return " ".join([*sentences, "See --help."])


def as_typed(sentence: str, flags_type: type) -> str:
    """Replaces names of fields in a message by flags.

    Names that are plain words, such as "model", are only replaced at the start of the message, and
    names in quotes or before "=", such as keyword arguments, nowhere.
    """
    for name in flag_names(flags_type):
        where = r"(?<![-\w/.\"'])" if "_" in name else "^"
        sentence = re.sub(rf"{where}{name}(?![-\w/=])", f"--{name}", sentence)
    return sentence


def _similar(word: str, known: Sequence[str]) -> list[str]:
    """Returns a list with the flag that a word probably means, or []."""
    suggested = _SUGGESTED.get(word, "")
    if suggested.partition(" ")[0] in known:
        return [suggested]
    return get_close_matches(word, known, 1, _SIMILAR)


def _of_other_algorithms(unknown: Iterable[str], known: Sequence[str]) -> Iterator[str]:
    """Yields messages that name built-in algorithms with a flag that is unknown here."""
    for word in unknown:
        name = _ALIASES.get(word, _SUGGESTED.get(word, word))
        having = [algo for algo in ALGOS if name in flag_names(config_of(algo))]
        if having and name not in known:
            yield f"--{name} is a setting of the algorithms {', '.join(having)}."


def _first_sentence(box: str) -> str:
    """Returns the first section of tyro's box on one line.

    On a terminal that cannot draw a box, lines of dashes separate the sections.
    """
    texts = [line.strip(_BOX) for line in box.splitlines()[1:]]
    rest = dropwhile(lambda text: not text.strip("-"), texts)
    section = [*takewhile(lambda text: text.strip("-"), rest)]
    if section and section[0].startswith("Missing from"):  # each name is followed by its help
        names = [text for text in section if text.isupper() and text.isidentifier()]
        return f"missing {', '.join(names)}"
    return " ".join(section)


def flag_names(flags_type: type) -> list[str]:
    """Returns the names of all flags of a program, as on the command line."""
    return [name for name, _ in kinds(flags_type)]


@REGISTRY.struct_rule
def _group(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Describes a dataclass to tyro: each help as one paragraph, with one default."""
    if not dataclasses.is_dataclass(info.type):
        return None
    kinds_of = get_type_hints(info.type, include_extras=True)
    fields = [
        _field(info.type, a_field, kinds_of[a_field.name], info.default)
        for a_field in dataclasses.fields(info.type)
    ]

    def checked(**values: Any) -> Any:
        try:
            return info.type(**values)
        except ValueError as error:
            raise _CheckFailed(str(error)) from error

    checked.__doc__ = info.type.__doc__  # for --help
    return StructConstructorSpec(checked, tuple(fields))


class _CheckFailed(Exception):
    """A check of a Config failed. It is not a ValueError, which tyro would draw into its box."""


def _field(owner: type, field: dataclasses.Field[Any], kind: Any, default: Any) -> StructFieldSpec:
    """Describes a flag, or a group of flags; default: of the owner, or tyro's MISSING."""
    is_made = callable(field.default_factory)
    usual = field.default_factory() if callable(field.default_factory) else field.default
    value = getattr(default, field.name) if isinstance(default, owner) else usual
    if dataclasses.is_dataclass(value):
        title = TITLES.get(field.name, field.name)
        kind = Annotated[kind, tyro.conf.arg(name=title, prefix_name=False)]
        return StructFieldSpec(field.name, kind, value)
    helptext = partial(_help_of, owner, field.name)

    def hint(label: str) -> str:
        if "Default: " in helptext():
            return "" if is_made or value == usual else f"(here: {label})"
        return "" if label in ("None", "", "''") else f"(default: {label})"

    value = tyro.MISSING_NONPROP if value is dataclasses.MISSING else value
    kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=hint)]
    return StructFieldSpec(field.name, kind, value, helptext)


@cache
def _help_of(owner: type, name: str) -> str:
    """Returns the docstring of a field, in one line."""
    owners = [base for base in owner.__mro__ if dataclasses.is_dataclass(base)]
    documented = (parameter for base in owners for parameter in parse_from_object(base).params)
    texts = (parameter.description for parameter in documented if parameter.arg_name == name)
    return " ".join((next(texts, None) or "").split())


def _read(words: Sequence[str]) -> dict[str, Any]:
    """Parses the value of the flag; raises ValueError unless it is a JSON object."""
    with suppress(json.JSONDecodeError):
        if isinstance(value := json.loads(words[0]), dict):
            return value
    raise ValueError(f"must be a JSON object such as '{{\"size\": 8}}', got {words[0]}")


def _read_switch(words: Sequence[str]) -> bool:
    """Parses the value; raises ValueError unless it is true or false."""
    if words[0].lower() not in _SWITCHED:
        raise ValueError(f"must be true or false, got {words[0]}")
    return _SWITCHED[words[0].lower()]


def _read_integer(words: Sequence[str]) -> int:
    """Parses an integer, which may be typed as 1e6; raises ValueError for anything else."""
    with suppress(ValueError):
        return int(words[0])
    with suppress(ValueError):
        if (value := float(words[0])).is_integer():
            return int(value)
    raise ValueError(f"must be an integer such as 8 or 1e6, got {words[0]}")


def _read_integer_or_none(words: Sequence[str]) -> int | None:
    return None if words[0] == "None" else _read_integer(words)


def _add_kind(
    kind: Any, metavar: str, read: Callable[[Sequence[str]], Any], show: Callable[[Any], str] = str
) -> None:
    """Tells tyro how to read a flag of this type from its word, and how to show its default."""

    @REGISTRY.primitive_rule
    def describe(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type != kind:
            return None
        return PrimitiveConstructorSpec(1, metavar, read, lambda _: True, lambda v: [show(v)])


def _read_path(words: Sequence[str]) -> Path:
    with refusing_paths("give it without ~"):
        return expanded(words[0])


_add_kind(KWARGS, "JSON", _read, json.dumps)
_add_kind(Shape, "|".join(SHAPES), itemgetter(0))  # the Config checks it
_add_kind(bool, "{true,false}", _read_switch, lambda v: str(v).lower())
_add_kind(SWITCH, "{true,false}", _read_switch, lambda v: "auto" if v is None else str(v).lower())
_add_kind(Path, "PATH", _read_path)
_add_kind(int, "INT", _read_integer)
_add_kind(int | None, "{None}|INT", _read_integer_or_none)
