# SPDX-License-Identifier: Apache-2.0
"""The C++ core: moves arrays between environments, actors and the learner.

Inputs are nests of torch tensors (on the CPU) or numpy arrays, and are copied; outputs are nests of
torch tensors that share the core's memory. README.md in this folder draws the data path, the
threads and the owner of each buffer.
"""

import pkgutil

# When Python is started in a checkout after `pip install .`, this folder shadows the installed
# package, which has the compiled module: search there too.
__path__ = pkgutil.extend_path(__path__, __name__)

try:
    from libtorchbeast._C import (
        ActorPool,
        AsyncError,
        Batch,
        BatchingQueue,
        ClosedBatchingQueue,
        Credentials,
        Door,
        DynamicBatcher,
        Host,
        NestError,
        Server,
        describe,
        server_status,
    )
except ModuleNotFoundError as error:
    raise ImportError(
        "the compiled part of libtorchbeast is missing for this Python; build it with "
        "'pip install .' in the checkout of TorchBeast",
        name="libtorchbeast",
    ) from error
except ImportError as error:
    raise ImportError(
        f"the compiled part of libtorchbeast cannot be loaded here ({error}); build it again with "
        "'pip install .' in the checkout of TorchBeast",
        name="libtorchbeast",
    ) from error

__all__ = [
    "ActorPool",
    "AsyncError",
    "Batch",
    "BatchingQueue",
    "ClosedBatchingQueue",
    "Credentials",
    "Door",
    "DynamicBatcher",
    "Host",
    "NestError",
    "Server",
    "describe",
    "server_status",
]
