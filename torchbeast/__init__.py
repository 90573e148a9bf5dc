# SPDX-License-Identifier: Apache-2.0
"""TorchBeast: reinforcement learning from many environments at once, in PyTorch.

Importing this package imports nothing heavy: an environment-server process never loads torch.
"""

__version__ = "1.0.0"
