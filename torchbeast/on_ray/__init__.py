# SPDX-License-Identifier: Apache-2.0
"""Everything that runs on Ray: workers, the shared replay, and the room for them on a cluster."""
