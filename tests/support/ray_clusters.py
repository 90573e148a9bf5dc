# SPDX-License-Identifier: Apache-2.0
"""A small Ray cluster of this machine, for as long as a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def small_cluster(**of_head: Any) -> Iterator[Any]:
    """Starts a cluster of one node with two CPUs; whatever token the user has is not asked for."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 * 10**6}
        head |= {"include_log_monitor": False, "no_monitor": True}  # each takes a second to start
        made = Cluster(initialize_head=True, head_node_args={**head, **of_head})
        try:
            yield made
        finally:
            made.shutdown()
