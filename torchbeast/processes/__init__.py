# SPDX-License-Identifier: Apache-2.0
"""Child processes, the supervisor of a run, and malloc settings of this process."""
