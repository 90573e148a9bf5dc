# SPDX-License-Identifier: Apache-2.0
"""Sources, which yield batches of rollouts."""
