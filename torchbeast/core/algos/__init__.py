# SPDX-License-Identifier: Apache-2.0
"""Algorithms: their losses, and the optimiser step they share."""
