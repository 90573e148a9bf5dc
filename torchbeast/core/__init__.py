# SPDX-License-Identifier: Apache-2.0
"""The machine learning: formulas, networks, algorithms, storages and environment protocols.

Importing this package imports neither torch nor numpy: environment servers use
`torchbeast.core.envs` without torch.
"""
