# SPDX-License-Identifier: Apache-2.0
"""Settings of the program."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchbeast.core.checks import between

DAYS_OF_AUTHORITY = 3650


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """The files to make."""

    hosts: str = ""
    """Names and addresses of the machines that listen, separated by commas and without ports: of
    environment servers, just as learners will name them in --env_servers; or of the learner, just
    as hosts that dial in will name it in --learner."""
    folder: str = "torchbeast-keys"
    """Where the files go. An authority and a token that are there are used again; certificates
    are replaced."""
    days: int = 365
    """Days for which the certificates are valid."""

    def __post_init__(self) -> None:
        between(1, DAYS_OF_AUTHORITY, days=self.days)


@dataclass(frozen=True, kw_only=True)
class KeysFlags:
    """Makes an authority, certificates and a token for machines that work together."""

    keys: KeysConfig = field(default_factory=KeysConfig)
