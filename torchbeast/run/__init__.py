# SPDX-License-Identifier: Apache-2.0
"""One run from its start to its end: assembles a learner, trains it, saves and resumes it."""
