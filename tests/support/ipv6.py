# SPDX-License-Identifier: Apache-2.0
"""Marks tests that need IPv6, which some machines and containers do not have."""

from __future__ import annotations

import socket

import pytest

HOME = "::1"


def _is_here() -> bool:
    try:
        socket.create_server((HOME, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _is_here(), reason="this machine has no IPv6")
