# SPDX-License-Identifier: Apache-2.0
"""The Python door: a Learner trains the agent of a Scheme, step by step."""
