# SPDX-License-Identifier: Apache-2.0
"""Child processes: starting, reporting, ending, replacing; and the supervisor of a run."""
