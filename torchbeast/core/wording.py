# SPDX-License-Identifier: Apache-2.0
"""Counts in sentences, and flags in commands that sentences name."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Returns so many of something in words: "1 server", "2 servers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def typed(flag: str, value: object) -> list[str]:
    """Returns a flag and its value as words of a command line that the programs read back."""
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
