# SPDX-License-Identifier: Apache-2.0
"""Learners in several processes: each collects and computes gradients; the update is joint."""
