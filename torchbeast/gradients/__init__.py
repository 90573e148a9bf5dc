# SPDX-License-Identifier: Apache-2.0
"""Data-parallel learners: each computes gradients, and all take the same optimiser step."""
