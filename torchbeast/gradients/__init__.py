# SPDX-License-Identifier: Apache-2.0
"""Several learners as one: each computes gradients, and all take the same step."""
