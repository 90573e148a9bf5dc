# SPDX-License-Identifier: Apache-2.0
"""A flag's default, check and help text are given once, in the Config of its component."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.flags import BenchFlags

from torchbeast.cli.command_line import with_algorithm
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.core.algos.config import StepConfig
from torchbeast.core.algos.registry import ALGOS, DEFAULT
from torchbeast.sweep.config import SweepConfig

PACKAGE = Path(__file__).parents[2] / "torchbeast"
# What processes send each other, where JSON may lack fields; what a gradient worker is made of;
# the storages of schemes, which users make themselves.
SENT = (
    "torchbeast.core.base.specs",
    "torchbeast.core.storages.storage",
    "torchbeast.gradients.worker",
)
# The environment and the precision of an export, which are usually the run's and float32; a
# learner's door, of which status asks and to which polybeast_env dials in; what a suite chooses for
# its runs.
ALIKE = [
    *(f"torchbeast.export.ExportFlags.{name}" for name in ("env", "env_kwargs", "precision")),
    "torchbeast.keys.KeysFlags.hosts",  # by name; of the bench: their number
    "torchbeast.status.StatusFlags.learner",
    *(f"torchbeast.suite.SuiteFlags.{name}" for name in ("algo", "name", "preset")),
]
PROGRAMS = [
    MonoBeastFlags,
    PolyBeastFlags,
    PolyBeastLearnerFlags,
    PolyBeastEnvFlags,
    RayBeastFlags,
    BenchFlags,
    SweepConfig,
    *(with_algorithm(MonoBeastFlags, name) for name in ALGOS if name != DEFAULT),
]


def groups(value: Any) -> Iterator[Any]:
    """Returns a program's flags and every Config in them, including nested ones."""
    yield value
    for field in dataclasses.fields(value):
        if dataclasses.is_dataclass(group := getattr(value, field.name)):
            yield from groups(group)


def flags_of(group: Any) -> list[str]:
    fields = dataclasses.fields(group)
    return [f.name for f in fields if not dataclasses.is_dataclass(getattr(group, f.name))]


def owner(config: type, flag: str) -> type:
    """Returns the class that defines the field."""
    return next(cls for cls in config.__mro__ if flag in inspect.get_annotations(cls))


@functools.cache
def help_texts(config: type) -> dict[str, str]:
    """Returns the docstring under each field that the class itself defines."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(cls, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in itertools.pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


OWNERS: dict[str, set[type]] = collections.defaultdict(set)
for program in PROGRAMS:
    for group in groups(program()):
        for name in flags_of(group):
            OWNERS[name].add(owner(type(group), name))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_each_flag_once(program: type) -> None:
    names = [name for group in groups(program()) for name in flags_of(group)]
    assert len(names) >= 5 and len(set(names)) == len(names)


def test_every_flag_has_one_help_text_for_each_of_its_meanings() -> None:
    """The meaning of a name, and its text, may depend on the program, as of --num_envs."""
    for name, configs in OWNERS.items():
        texts = [help_texts(config)[name] for config in configs]
        assert all(texts) and len(set(texts)) == len(texts), f"{name} is told twice: {configs}"
    assert len(OWNERS) > 40


def test_every_config_is_frozen_and_keyword_only() -> None:
    configs: set[Any] = set().union(*OWNERS.values())
    for config in configs:
        parameters = config.__dataclass_params__
        assert parameters.frozen, config
        assert all(field.kw_only for field in dataclasses.fields(config)), config


def dataclasses_of(source: str) -> Iterator[ast.ClassDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and "dataclass" in map(_name, node.decorator_list):
            yield node


def _name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def defaults_of(cls: ast.ClassDef) -> set[str]:
    """Returns the fields that have a default."""
    fields = [line for line in cls.body if isinstance(line, ast.AnnAssign)]
    return {field.target.id for field in fields if field.value and not _is_required(field.value)}


def _is_required(value: ast.expr) -> bool:
    """`field(kw_only=True)` has no default."""
    if not isinstance(value, ast.Call) or _name(value) != "field":
        return False
    return not any(str(word.arg).startswith("default") for word in value.keywords)


def test_no_other_dataclass_gives_a_flag_a_default_again() -> None:
    programs = {cls for program in PROGRAMS for cls in program.__mro__}  # of groups, not of flags
    known = {(cls.__module__, cls.__name__) for cls in programs.union(*OWNERS.values())}
    again = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for cls in dataclasses_of(path.read_text()):
            if (module, cls.name) not in known and module not in SENT:
                again += [f"{module}.{cls.name}.{name}" for name in defaults_of(cls) & set(OWNERS)]
    assert sorted(again) == ALIKE


def test_the_check_finds_a_repeated_default() -> None:
    source = "@dataclass(frozen=True)\nclass A:\n    batch_size: int = 8\n    seed: int\n"
    assert [defaults_of(cls) for cls in dataclasses_of(source)] == [{"batch_size"}]


def test_a_setting_that_a_subclass_declares_again_keeps_its_bounds() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Clipped(StepConfig):
        grad_norm_clipping: float = 1.0

    with pytest.raises(ValueError, match="grad_norm_clipping must be greater than 0, got -1"):
        Clipped(grad_norm_clipping=-1)
