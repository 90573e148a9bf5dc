# SPDX-License-Identifier: Apache-2.0
"""The source that plays in the learner's own process."""
