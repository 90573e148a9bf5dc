# SPDX-License-Identifier: Apache-2.0
"""The folders of libtorchbeast include only those above them, as its README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "libtorchbeast"
README = (CORE / "README.md").read_text()
ORDER = re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def included_by(file: Path) -> list[str]:
    return _INCLUDE.findall(file.read_text())


def of_core(folder: str) -> list[Path]:
    files = [*(CORE / folder).glob("*.h"), *(CORE / folder).glob("*.cc")]
    return [file for file in files if not file.stem.endswith("_test")]


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_includes_itself_and_those_above_it(folder: str) -> None:
    files = of_core(folder)
    assert files, "every folder of the table has code"
    allowed = ORDER[: ORDER.index(folder) + 1]
    for file in files:
        for name in included_by(file):
            if name.startswith("libtorchbeast/"):
                assert name.split("/")[1] in allowed, f"{file} includes {name}"


def test_the_generated_service_is_included_by_one_header() -> None:
    """Whoever includes it alone parses messages before they are checked."""
    files = [*CORE.glob("*/*.h"), *CORE.glob("*/*.cc"), *(CORE.parent / "benchmarks").glob("*.cc")]
    including = [file for file in files if "rpcenv.grpc.pb.h" in included_by(file)]
    assert including == [CORE / "proto" / "service.h"]
