# SPDX-License-Identifier: Apache-2.0
"""The core that moves arrays between environments, actors and the learner.

Leaves of nests that go in are torch tensors (on the CPU) or numpy arrays, and are copied; leaves
that come out are torch tensors that share the core's memory. README.md beside this file draws the
data path, the threads and who owns each buffer.
"""

import pkgutil

# In a checkout whose compiled part was installed elsewhere (`pip install .` and then Python
# started in the checkout), this folder shadows the installed one: look there too.
__path__ = pkgutil.extend_path(__path__, __name__)

try:
    from libtorchbeast._C import (
        ActorPool,
        AsyncError,
        Batch,
        BatchingQueue,
        ClosedBatchingQueue,
        DynamicBatcher,
        NestError,
        Server,
        describe,
    )
except ModuleNotFoundError as error:
    raise ImportError(
        "the compiled part of libtorchbeast is missing for this Python; build it with "
        "'pip install .' in the checkout of TorchBeast",
        name="libtorchbeast",
    ) from error

__all__ = [
    "ActorPool",
    "AsyncError",
    "Batch",
    "BatchingQueue",
    "ClosedBatchingQueue",
    "DynamicBatcher",
    "NestError",
    "Server",
    "describe",
]
