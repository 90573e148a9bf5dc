# SPDX-License-Identifier: Apache-2.0
"""From a batch to new weights: slices, statistics, gradients of several learners, checkpoints."""
