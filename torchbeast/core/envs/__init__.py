# SPDX-License-Identifier: Apache-2.0
"""What TorchBeast needs of environments: spaces, the vector protocol, frame stacks. Numpy only."""
