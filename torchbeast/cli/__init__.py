# SPDX-License-Identifier: Apache-2.0
"""The command lines of the programs, composed from the Configs of their components."""
