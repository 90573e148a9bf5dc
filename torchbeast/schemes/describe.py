# SPDX-License-Identifier: Apache-2.0
"""Describes a scheme: its parts, and what goes between them, as text and for notebooks."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, NamedTuple

from torchbeast.core.base.checks import counted

if TYPE_CHECKING:
    from torchbeast.schemes.scheme import Scheme


class Part(NamedTuple):
    """A part of a scheme."""

    title: str
    lines: list[str]


def parts(scheme: Scheme) -> list[Part]:
    """Returns collection, storage and learner, in the order in which data passes them."""
    return [_collection(scheme), _storage(scheme), _learner(scheme)]


def text_of(scheme: Scheme) -> str:
    """Returns a paragraph for each part."""
    said = [
        f"{part.title}\n" + "\n".join(f"  {line}" for line in part.lines) for part in parts(scheme)
    ]
    forward, back = _ways(scheme)
    return "\n".join([*said, "forward", f"  {forward} for each update", "back", f"  {back}"])


_BOX = '<div style="border:1px solid; border-radius:6px; padding:0.5em 1em"><b>{}</b><br>{}</div>'
_ARROW = '<div style="align-self:center; padding:0 0.5em">{}</div>'


def html_of(scheme: Scheme) -> str:
    """Returns the parts as boxes in a row, for a notebook, and what passes between them."""
    boxes = [
        _BOX.format(html.escape(part.title), "<br>".join(map(html.escape, part.lines)))
        for part in parts(scheme)
    ]
    row = _ARROW.format("&#8644;").join(boxes)
    forward, back = map(html.escape, _ways(scheme))
    ways = f"<div>&#8594; {forward} for each update<br>&#8592; {back}</div>"
    return f'<div style="display:flex; flex-wrap:wrap; margin-bottom:0.5em">{row}</div>{ways}'


def _ways(scheme: Scheme) -> tuple[str, str]:
    """Returns what goes forward, to the learner, and what goes back."""
    rollouts = scheme.rollouts
    forward = f"{rollouts.batch_size} rollouts of {rollouts.unroll_length} steps"
    if scheme.learns_from_transitions:
        forward = f"{rollouts.batch_size} replayed steps"
    if scheme.col_remote_workers == 0:
        return forward, "the newest weights, at every batch"
    if scheme.is_synchronous:
        return forward, "the newest weights, at every batch: all workers wait for them"
    if scheme.inference == "central":
        return forward, "actions, of the newest weights: nobody waits for an update"
    return forward, "the newest weights, at every step: nobody waits"


def _collection(scheme: Scheme) -> Part:
    size, workers = scheme.train_envs_factory.vec_env_size, scheme.col_remote_workers
    envs = counted(size, "environment")
    if not workers:
        stops = _stragglers(scheme)
        return Part("collection", [f"{_learners(scheme)}: {envs}", f"synchronous{stops}"])
    each = f"{_workers(workers, scheme.col_backend)} with {envs} each"
    whose = ["for every gradient worker"] if scheme.grad_remote_workers else []
    central = [f"actions {_learners(scheme)}"] if scheme.inference == "central" else []
    return Part("collection", [each, *whose, *central, scheme.col_communication])


def _stragglers(scheme: Scheme) -> str:
    """Says when the others of the gradient workers stop."""
    gradients = scheme.gradients
    if gradients is None or not gradients.has_stragglers:
        return ""
    return f", until {gradients.fraction_workers:.0%} are ready"


def _learners(scheme: Scheme) -> str:
    return "in each gradient worker" if scheme.grad_remote_workers else "in the learner's process"


def _storage(scheme: Scheme) -> Part:
    lines = [type(scheme.storage_factory).__name__, _learners(scheme)]
    if scheme.replay.is_used:
        lines.append(f"replay of {scheme.replay.replay_size:,} steps")
    if scheme.learns_from_transitions:
        lines.append(_sampling(scheme))
    return Part("storage", lines)


def _sampling(scheme: Scheme) -> str:
    how, ratio = scheme.transitions, scheme.replay.replay_ratio
    often = "as often as possible" if math.isinf(ratio) else f"{ratio:g} for each new one"
    by_priority = ", by priority" if how.priority_exponent else ""
    goals = f", {how.hindsight_share:g} with other goals" if how.hindsight_share else ""
    return f"{often}{by_priority}{goals}"


def _learner(scheme: Scheme) -> Part:
    network = scheme.actor_factory.spec
    memory = ", recurrent" if network.use_lstm else ""
    return Part(
        "learner",
        [
            f"{scheme.algo_factory.algo.__name__}, network {network.name}{memory}",
            _gradients(scheme),
            f"update {scheme.update_execution}",
        ],
    )


def _gradients(scheme: Scheme) -> str:
    workers = scheme.grad_remote_workers
    if not workers:
        return "gradients in this process"
    where = _workers(workers, scheme.grad_backend)
    return f"gradients in {where}, {scheme.grad_communication}"


def _workers(count: int, backend: str) -> str:
    return (
        counted(count, "Ray actor") if backend == "ray" else f"{count} process{'es' * (count > 1)}"
    )
