# SPDX-License-Identifier: Apache-2.0
"""Names that settings choose from; apart from the code that obeys them, which imports torch."""

from typing import Literal

Precision = Literal["auto", "float32", "bfloat16"]
"""Of features; everything else is float32. auto: bfloat16 where the hardware multiplies it."""
