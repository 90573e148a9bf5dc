# SPDX-License-Identifier: Apache-2.0
"""Reads metrics as Prometheus does, with its own parser."""

from __future__ import annotations

import urllib.request


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Returns the samples by name and values of labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
