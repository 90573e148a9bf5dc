# SPDX-License-Identifier: Apache-2.0
"""The Python door: a Learner trains the agent of a Scheme, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.lazy import importing

if TYPE_CHECKING:
    from torchbeast.learner.callback import Callback as Callback
    from torchbeast.learner.checkpoints import Checkpoints as Checkpoints
    from torchbeast.learner.evaluation import Evaluation as Evaluation
    from torchbeast.learner.learner import Learner as Learner

_FOUND_IN = {
    "Callback": "callback",
    "Checkpoints": "checkpoints",
    "Evaluation": "evaluation",
    "Learner": "learner",
}

__all__ = [*_FOUND_IN]

__getattr__ = importing(__name__, _FOUND_IN)
