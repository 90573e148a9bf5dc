# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/combinations.md's table and the pictures of docs/explanation/schemes.md.

python tests/learner/scheme_docs.py
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Iterator
from pathlib import Path

from small_schemes import impala_of, off_policy_of

from torchbeast import make_env
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.errors import IncompatibleParts
from torchbeast.schemes import Scheme
from torchbeast.schemes.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "explanation" / "schemes.md"
COMBINATIONS = DOCS / "reference" / "combinations.md"
PICTURES = PAGE.parent / "schemes"
LARGE = ("impala", "seed", "ape-x", "dppo", "dd-ppo", "rapid")
"""Architectures that have a picture of their own."""
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

    Combinations that run, and combinations that are refused with one sentence, share rows. An axis
    that may have any value is empty.
    """
    lines = ["| " + " | ".join([*AXES, ""]) + " |", "|" + " --- |" * (len(AXES) + 1)]
    running: list[tuple[object, ...]] = []
    refused: dict[str, list[tuple[object, ...]]] = {}
    for values, made in combinations():
        if isinstance(made, Scheme):
            running.append(values)
        else:
            refused.setdefault(str(made), []).append(values)
    lines += [_row(row, "runs") for row in _joined(running)]
    for sentence, rows in refused.items():
        columns = [set(column) for column in zip(*rows, strict=True)]
        shared = [column.pop() if len(column) == 1 else "" for column in columns]
        lines.append(_row(tuple(shared), sentence))
    return "\n".join(lines) + "\n"


@functools.cache
def combinations() -> list[tuple[tuple[object, ...], Scheme | IncompatibleParts]]:
    """Returns all combinations of the axes, each with its scheme or the error that refuses it."""
    return [(values, _made_of(values)) for values in itertools.product(*AXES.values())]


def _made_of(values: tuple[object, ...]) -> Scheme | IncompatibleParts:
    axes = dict(zip(AXES, values, strict=True))
    make = STORAGES[str(axes.pop("storage_factory"))]
    try:
        return make(**axes)
    except IncompatibleParts as error:
        return error


def _joined(rows: list[tuple[object, ...]]) -> list[tuple[str, ...]]:
    """Joins rows that differ in one axis only, for one axis after the other."""
    joined = [tuple(map(str, row)) for row in rows]
    for axis, values in enumerate(AXES.values()):
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in joined:
            groups.setdefault(row[:axis] + row[axis + 1 :], []).append(row[axis])
        joined = [
            (*rest[:axis], "" if len(cells) == len(values) else ", ".join(cells), *rest[axis:])
            for rest, cells in groups.items()
        ]
    return joined


def _row(values: tuple[object, ...], what: str) -> str:
    return "| " + " | ".join([*map(str, values), what]) + " |"


def with_table(page: str) -> str:
    """Returns the page with the table in its place."""
    return _TABLE.sub(lambda _: table(), page)


def pictures() -> Iterator[tuple[Path, str]]:
    """Yields the file and the SVG image of every picture."""
    envs, _, _ = VecEnv.create_factory(env_fn=make_env, env_kwargs={"env": "CartPole-v1"})
    yield PICTURES / "overview.svg", _image(*_overview(envs))
    for name in LARGE:
        drawing, width, height = _drawing(Scheme.preset(name, envs))
        centred = f'<g transform="translate({(700 - width) // 2})">{drawing}</g>'
        yield PICTURES / f"{name}.svg", _image(centred, height)


def _image(body: str, height: int) -> str:
    """Returns an SVG image with a legend."""
    template = string.Template(Path(__file__).with_name("scheme.svg").read_text())
    return template.substitute(body=body, bottom=height, height=height + 56)


def _overview(envs: VecEnvFactory) -> tuple[str, int]:
    """Returns small drawings of all architectures, with a row for each kind, and the height."""
    rows: dict[str, dict[tuple[str, int, int], list[str]]] = {"one process": {}, "workers": {}}
    for name in PRESETS:
        scheme = Scheme.preset(name, envs)
        kind = ["one process", *(title for title, *_ in _columns(scheme))][-2]
        rows.setdefault(kind, {}).setdefault(_drawing(scheme), []).append(name)
    cells = []
    for y, (kind, drawings) in zip(itertools.count(16, 130), rows.items()):
        cells.append(_text(350, y, kind))
        left = 352 - 87 * len(drawings)
        for x, ((body, width, _), names) in zip(itertools.count(left, 174), drawings.items()):
            scale = 165 / max(415, width)
            cells.append(f'<g class="small" transform="translate({x} {y}) scale({scale:.3f})">')
            cells.append(f"{body}</g>{_text(x + int(scale * width / 2), y + 92, ', '.join(names))}")
    return "\n".join(cells), 130 * len(rows)


def _columns(scheme: Scheme) -> Iterator[tuple[str, int, list[str], str]]:
    """Yields columns of processes: title, number, contents, and arrows to the next column."""
    workers, learners = scheme.col_remote_workers, scheme.grad_remote_workers
    central, joint = scheme.inference == "central", scheme.update_execution == "decentralised"
    contents = {"environments": not workers, "copy": central, "replay": scheme.replay.is_used}
    inside = [symbol for symbol, is_there in contents.items() if is_there]
    if workers:
        arrows = "observations" if central else f"rollouts-{scheme.col_communication}"
        symbols = ["environments"] if central else ["environments", "copy"]
        yield "workers", workers * max(1, learners), symbols, arrows
    if learners:
        arrows = "weights" if joint else f"gradients-{scheme.grad_communication}"
        yield "gradient workers", learners, [*inside, "trained" if joint else "copy"], arrows
        inside = []
    yield "learner's process", 1, [*inside, "copy" if joint else "trained"], "none"


def _drawing(scheme: Scheme) -> tuple[str, int, int]:
    """Returns the columns of a scheme side by side, their width and their height."""
    columns = list(_columns(scheme))
    lanes = max(count for _, count, _, _ in columns)
    drawn = []
    for x, (title, count, symbols, arrows) in zip(itertools.count(0, 265), columns):
        drawn.append(_text(x + 75, 16, title))
        height = lanes * 72 // count - 28
        for number in range(count):
            y = 28 + (height + 28) * number
            box = f'<rect class="line" x="{x}" y="{y}" width="150" height="{height}" rx="8"/>'
            drawn += [box, *(_use(symbol, x, y + height // 2) for symbol in symbols)]
            # Processes that add up their gradients have equal weights; the first one sends them.
            drawn.append(_use("exchange" if arrows == "weights" and number else arrows, x, y))
    return "\n".join(drawn), 265 * len(columns) - 115, 28 + 72 * lanes


def _use(name: str, x: int, y: int) -> str:
    return f'<use href="#{name}" x="{x}" y="{y}"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{text}</text>'


if __name__ == "__main__":
    COMBINATIONS.write_text(with_table(COMBINATIONS.read_text()))
    for path, image in pictures():
        path.write_text(image)
