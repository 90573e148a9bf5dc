# SPDX-License-Identifier: Apache-2.0
"""Evaluation: playing whole episodes to measure an agent, and videos of them."""
