# SPDX-License-Identifier: Apache-2.0
"""Nests, specs, checks, and the settings of torch that our code relies on."""
