# SPDX-License-Identifier: Apache-2.0
"""Small Rays of this machine, for as long as a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",  # whatever token the user has is not asked for
    "RAY_prestart_worker_first_driver": "0",  # one for each CPU, which our actors cannot use
}


@contextmanager
def _variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        yield


@contextmanager
def small_cluster(**of_head: Any) -> Iterator[Any]:
    """Starts a cluster of one node with two CPUs."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 * 10**6}
    head |= {"include_log_monitor": False, "no_monitor": True}  # each takes a second to start
    with _variables():
        made = Cluster(initialize_head=True, head_node_args={**head, **of_head})
        try:
            yield made
        finally:
            made.shutdown()


@contextmanager
def callers_ray(**resources: Any) -> Iterator[None]:
    """Initialises Ray in this process, as a caller may; asserts that it is left running."""
    import ray

    with _variables():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 10**6,
            **resources,
        )
        yield
        assert ray.is_initialized()
        ray.shutdown()
