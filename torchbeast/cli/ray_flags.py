# SPDX-License-Identifier: Apache-2.0
"""RayBeast's flags; see learner_flags.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchbeast.cli.learner_flags import LearnerFlags
from torchbeast.envs.spec import EnvConfig
from torchbeast.on_ray.config import RayConfig


@dataclass(frozen=True, kw_only=True)
class RayBeastFlags(LearnerFlags):
    """Trains an agent on Ray: on this machine, or on a cluster (--address)."""

    environment: EnvConfig = field(default_factory=EnvConfig)
    ray: RayConfig = field(default_factory=RayConfig)
