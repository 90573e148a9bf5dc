# SPDX-License-Identifier: Apache-2.0
"""Output of a run: its folder, logs, display and diagnosis."""
