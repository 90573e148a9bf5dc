# SPDX-License-Identifier: Apache-2.0
"""The Python API: a Learner trains the agent of a Scheme, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.learner.learner import Learner as Learner
    from torchbeast.run.callbacks import Callback as Callback
    from torchbeast.run.callbacks import RunningLearner as RunningLearner
    from torchbeast.run.periodic import Checkpoints as Checkpoints
    from torchbeast.run.periodic import Evaluation as Evaluation

__all__, __getattr__, __dir__ = importing(__name__)
