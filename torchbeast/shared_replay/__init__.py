# SPDX-License-Identifier: Apache-2.0
"""A replay that several agents share, in a separate process."""
