# SPDX-License-Identifier: Apache-2.0
"""Evaluation: plays whole episodes to measure an agent, and writes videos of them."""
