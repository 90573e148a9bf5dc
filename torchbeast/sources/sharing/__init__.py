# SPDX-License-Identifier: Apache-2.0
"""A replay that several agents share, as a process of its own on their machine."""
