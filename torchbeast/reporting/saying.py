# SPDX-License-Identifier: Apache-2.0
"""Says something to the user that out.log should have too."""

from __future__ import annotations

import logging

_log = logging.getLogger("torchbeast.said")


def say(sentence: str) -> None:
    """Prints a sentence, and logs it: whoever asks tomorrow has out.log alone."""
    _log.info("%s", sentence)
    print(sentence, flush=True)
