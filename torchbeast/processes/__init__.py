# SPDX-License-Identifier: Apache-2.0
"""Child processes, their supervisor, and the memory of this process."""
