# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/combinations.md's table and the pictures of docs/explanation/schemes.md.

python tests/learner/scheme_docs.py
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from small_schemes import impala_of, off_policy_of

from torchbeast import make_env
from torchbeast.core.envs import VecEnv
from torchbeast.schemes import Scheme
from torchbeast.schemes.describe import Part, parts, ways
from torchbeast.schemes.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "explanation" / "schemes.md"
COMBINATIONS = DOCS / "reference" / "combinations.md"
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
        yield PAGE.parent / "schemes" / f"{name}.svg", svg_of(Scheme.preset(name, envs))


_WIDTH, _HEIGHT, _GAP, _LINE = 250, 110, 130, 18


def svg_of(scheme: Scheme) -> str:
    """Returns an SVG image: the parts side by side, and the ways between them."""
    boxes = parts(scheme)
    width = len(boxes) * _WIDTH + (len(boxes) - 1) * _GAP + 40
    height = _HEIGHT + 120
    forward, back = ways(scheme)
    body = [_box(part, 20 + index * (_WIDTH + _GAP)) for index, part in enumerate(boxes)]
    body += _arrows(len(boxes), width, forward, back)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">\n'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _box(part: Part, left: int) -> str:
    lines = [
        f'<text x="{left + 12}" y="{66 + _LINE * index}">{escape(line)}</text>'
        for index, line in enumerate(part.lines)
    ]
    return "\n".join(
        [
            f'<rect x="{left}" y="20" width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#eef3fa" '
            'stroke="#456"/>',
            f'<text x="{left + 12}" y="44" font-weight="bold">{part.title}</text>',
            *lines,
        ]
    )


def _arrows(count: int, width: int, forward: str, back: str) -> Iterator[str]:
    """Yields an arrow between neighbours, and one from the last part back to the first."""
    y = 20 + _HEIGHT // 2
    for index in range(count - 1):
        left = 20 + (index + 1) * _WIDTH + index * _GAP
        yield _line(f"M{left + 4},{y} H{left + _GAP - 4}")
    yield _label(width // 2, _HEIGHT + 48, f"{forward} →")
    bottom, right, left = _HEIGHT + 80, width - 20 - _WIDTH // 2, 20 + _WIDTH // 2
    yield _line(f"M{right},{_HEIGHT + 20} V{bottom} H{left} V{_HEIGHT + 26}")
    yield _label(width // 2, bottom + 20, f"← {back}")


def _label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#456" stroke-width="1.5" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    COMBINATIONS.write_text(with_table(COMBINATIONS.read_text()))
    for path, image in pictures():
        path.write_text(image)
