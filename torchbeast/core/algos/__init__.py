# SPDX-License-Identifier: Apache-2.0
"""Algorithms: the losses, and the one optimiser step they share."""
