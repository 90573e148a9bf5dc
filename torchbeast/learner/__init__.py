# SPDX-License-Identifier: Apache-2.0
"""The Python API: a Learner trains the agent of a Scheme, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.learner.learner import Learner as Learner
    from torchbeast.run.callbacks import Callback as Callback
    from torchbeast.run.callbacks import Checkpoints as Checkpoints
    from torchbeast.run.callbacks import Evaluation as Evaluation
    from torchbeast.run.running import RunningLearner as RunningLearner

__all__, __getattr__, __dir__ = importing(__name__)
