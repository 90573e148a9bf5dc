# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's source: actor processes that share memory with the learner."""
