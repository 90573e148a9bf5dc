# SPDX-License-Identifier: Apache-2.0
"""EnvSpec: what a process needs to make its environments; EnvError, where it cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchbeast.core.specs import Spec
from torchbeast.envs.options import DEFAULTS, EnvOptions
from torchbeast.errors import UsageError


class EnvError(UsageError):
    """An environment that cannot be made."""


AnyEnvSpec = TypeVar("AnyEnvSpec", bound="EnvSpec")


@dataclass(frozen=True)
class EnvSpec(Spec):
    """An environment: a name that `envs.make` knows, arguments of its constructor, and options."""

    options: EnvOptions = field(default=DEFAULTS, kw_only=True)

    @property
    def is_factory(self) -> bool:
        """Whether it is a user's own callable; "module:Id-v0" is an id of Gymnasium."""
        return bool(self.pickled) or (":" in self.name and not re.search(r"-v\d+$", self.name))

    @classmethod
    def from_parent(cls: type[AnyEnvSpec], value: Mapping[str, Any]) -> AnyEnvSpec:
        """Reads the JSON that the parent process sent; missing options have their defaults."""
        return super().from_parent({**value, "options": EnvOptions.of(value.get("options", {}))})
