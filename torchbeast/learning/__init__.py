# SPDX-License-Identifier: Apache-2.0
"""Puts a learner together and runs it: hardware, training loop, checkpoints, weights."""
