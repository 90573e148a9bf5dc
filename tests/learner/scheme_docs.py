# SPDX-License-Identifier: Apache-2.0
"""Writes docs/combinations.md's table and the pictures of docs/schemes.md.

python tests/learner/scheme_docs.py
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from small_schemes import impala_of, off_policy_of

from torchbeast import make_env
from torchbeast.core.envs import VecEnv
from torchbeast.schemes import Scheme
from torchbeast.schemes.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "schemes.md"
COMBINATIONS = DOCS / "combinations.md"
STORAGES = {"OnPolicyVTraceBuffer": impala_of, "ReplayBuffer": off_policy_of}
AXES = {
    "storage_factory": STORAGES,
    "col_remote_workers": (0, 2),
    "col_communication": ("synchronous", "asynchronous"),
    "col_backend": ("processes", "ray"),
    "inference": ("worker", "central"),
    "grad_remote_workers": (0, 2),
    "grad_backend": ("processes", "ray"),
    "grad_communication": ("synchronous", "asynchronous"),
    "update_execution": ("centralised", "decentralised"),
}
_TABLE = re.compile(r"(?<=<!-- combinations -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    """Returns the combinations that there are, and for the others the sentence that refuses them.

    Combinations that are refused with one sentence share a row, where an axis that may have any
    value is empty.
    """
    lines = ["| " + " | ".join([*AXES, ""]) + " |", "|" + " --- |" * (len(AXES) + 1)]
    refused: dict[str, list[tuple[object, ...]]] = {}
    for values, made in combinations():
        if isinstance(made, Scheme):
            lines.append(_row(values, "runs"))
        else:
            refused.setdefault(str(made), []).append(values)
    for sentence, rows in refused.items():
        columns = [set(column) for column in zip(*rows, strict=True)]
        shared = [column.pop() if len(column) == 1 else "" for column in columns]
        lines.append(_row(tuple(shared), sentence))
    return "\n".join(lines) + "\n"


def combinations() -> Iterator[tuple[tuple[object, ...], Scheme | NotImplementedError]]:
    """Yields all combinations of the axes, each with its scheme or the error that refuses it."""
    for values in itertools.product(*AXES.values()):
        axes = dict(zip(AXES, values, strict=True))
        make = STORAGES[str(axes.pop("storage_factory"))]
        try:
            yield values, make(**axes)
        except NotImplementedError as error:
            yield values, error


def _row(values: tuple[object, ...], what: str) -> str:
    return "| " + " | ".join([*map(str, values), what]) + " |"


def with_table(page: str) -> str:
    """Returns the page with the table in its place."""
    return _TABLE.sub(lambda _: table(), page)


def pictures() -> Iterator[tuple[Path, str]]:
    """Yields the file and the SVG image of every named architecture, with 8 environments."""
    envs, _, _ = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": "CartPole-v1"}, vec_env_size=8
    )
    for name in PRESETS:
        yield DOCS / "schemes" / f"{name}.svg", Scheme.preset(name, envs).describe("svg")


if __name__ == "__main__":
    COMBINATIONS.write_text(with_table(COMBINATIONS.read_text()))
    for path, image in pictures():
        path.write_text(image)
