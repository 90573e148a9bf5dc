# SPDX-License-Identifier: Apache-2.0
"""A Ray that the caller of a Learner has initialised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def callers_ray(**resources: Any) -> Iterator[None]:
    """Initialises Ray on this machine; asserts that a Learner has left it running."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")
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
