# SPDX-License-Identifier: Apache-2.0
"""Collects experience: sources, which yield batches of rollouts or transitions."""
