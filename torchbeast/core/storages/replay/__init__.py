# SPDX-License-Identifier: Apache-2.0
"""Replays: where steps and rollouts are kept, and how they are sampled."""
