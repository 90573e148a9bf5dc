# SPDX-License-Identifier: Apache-2.0
"""What a run tells: its folder, logs, display and diagnosis."""
