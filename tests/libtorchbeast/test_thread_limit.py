# SPDX-License-Identifier: Apache-2.0
"""A process that may start no more threads says so and ends, also where gRPC needs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from background import SOON
from serving import served_elsewhere

CODE = "import sys, libtorchbeast as l; l.describe(sys.argv[1], 60.0)"


@pytest.fixture(scope="module")
def few_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that limits the threads of a program."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("a limit of threads needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("limit") / "few_threads.so"
    source = Path(__file__).with_name("few_threads.c")
    words = [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(words, check=True)
    return library


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_limit_of_threads_is_an_error_with_a_remedy(
    number: int, few_threads: Path, tmp_path: Path
) -> None:
    """gRPC 1.51 starts several itself, and waits without end for those that did not start."""
    path = tmp_path / "server"
    limit = {
        "LD_PRELOAD": str(few_threads),
        "FEW_THREADS": str(number),
        "OPENBLAS_NUM_THREADS": "1",
    }
    with served_elsewhere(path):
        words = [sys.executable, "-c", CODE, f"unix:{path}"]
        env = os.environ | limit
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=SOON)
    assert done.returncode == 1
    assert "no thread can be started (" in done.stderr
    assert "raise the limit of threads (ulimit -u, or pids.max of a container)" in done.stderr
