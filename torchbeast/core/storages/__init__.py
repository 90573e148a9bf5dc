# SPDX-License-Identifier: Apache-2.0
"""What holds experience between acting and learning."""
