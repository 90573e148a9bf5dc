# SPDX-License-Identifier: Apache-2.0
"""Plays whole episodes to measure an agent; video."""
