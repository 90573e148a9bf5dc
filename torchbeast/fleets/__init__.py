# SPDX-License-Identifier: Apache-2.0
"""Child processes: how they start, report, end and are replaced; the supervisor of a run."""
