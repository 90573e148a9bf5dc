# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a host changes with what its servers describe, and with nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtorchbeast._C")

from serving import serving

from torchbeast import envs
from torchbeast.errors import RunError
from torchbeast.sources.tunnel.fingerprint import fingerprint


def of(folder: Path, env: str = "Catch", num_envs: int = 2, **options: Any) -> str:
    address = f"unix:{folder}/{env}-{num_envs}"
    with serving(lambda: envs.make(env, num_envs), address, **options):
        return fingerprint([address], lambda: False)


def test_servers_that_serve_the_same_have_one_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert of(tmp_path) == of(tmp_path / "other")
    assert re.fullmatch("[0-9a-f]{16}", of(tmp_path))


def test_each_difference_changes_it(tmp_path: Path) -> None:
    others = [
        of(tmp_path, num_envs=4),
        of(tmp_path, env="Mock"),
        of(tmp_path, num_streams=2),
        of(tmp_path, env_id="Other"),
    ]
    assert len({of(tmp_path), *others}) == 5


def test_a_run_that_has_ended_waits_for_no_server(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no environment server answers"):
        fingerprint([f"unix:{tmp_path}/none"], lambda: True)
