# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/explanation/schemes.md run as they are printed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from later import later

import torchbeast
from examples import cartpole, curriculum, half_cheetah


def test_the_minimal_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("pybullet_envs_gymnasium")
    half_cheetah.main(str(tmp_path / "run"), target_steps=2000)
    saved = torchbeast.load_checkpoint(tmp_path / "run" / "model.tar")
    assert saved["stats"]["step"] == 2000


def test_without_pybullet_the_example_says_what_to_install() -> None:
    if find_spec("pybullet_envs_gymnasium"):
        pytest.skip("PyBullet is installed")
    with pytest.raises(ValueError, match=r"pip install 'torchbeast\[pybullet\]'"):
        half_cheetah.main()


@pytest.mark.parametrize("workers", [0, later(2)])
def test_the_cartpole_example_learns_and_evaluates(
    workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cartpole.main(seed=1, workers=workers, target_steps=1024)
    assert "mean return of 100 episodes" in capsys.readouterr().out


@pytest.mark.long
def test_only_the_curriculum_teaches_the_long_corridor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert curriculum.main(is_taught=True, target_steps=25_000) > 0.9
    assert curriculum.main(is_taught=False, target_steps=5_000) == 0
