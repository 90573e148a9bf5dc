# SPDX-License-Identifier: Apache-2.0
"""What is learnt, and from what: formulas, networks, algorithms, storages, environments.

Importing this package imports neither torch nor numpy: environment servers use
`torchbeast.core.envs` without torch.
"""
