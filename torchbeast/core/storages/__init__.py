# SPDX-License-Identifier: Apache-2.0
"""Containers of experience between acting and learning."""
