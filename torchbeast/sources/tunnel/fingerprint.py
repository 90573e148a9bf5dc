# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of what a host serves, by which the door sees that it came back with other servers.

The learner's streams expect behind an address what was there when it was described: other servers
get other addresses (`place.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from torchbeast.sources.servers.discovery import Asking

_TIMEOUT_S = 60.0  # for each server, which runs already
_DIGITS = 16


def fingerprint(addresses: Sequence[str], stopped: Callable[[], bool]) -> str:
    """Returns 16 hexadecimal digits, the same for servers with the same descriptions.

    Raises RunError when a server does not answer, or once `stopped` returns true.
    """
    asking = Asking(_TIMEOUT_S, stopped)
    said = json.dumps([asking.ask(address) for address in addresses], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]
