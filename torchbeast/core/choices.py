# SPDX-License-Identifier: Apache-2.0
"""Choices of settings; separate from the code that uses them, which imports torch."""

from typing import Literal

Precision = Literal["auto", "float32", "bfloat16"]
"""Precision of features; everything else is float32. auto: bfloat16 if the hardware supports it."""

RewardClipping = Literal["abs_one", "none"]
"""Treatment of rewards. abs_one: clipped to [-1, 1]. none: as the environment gave them."""
