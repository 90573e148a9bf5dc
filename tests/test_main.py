# SPDX-License-Identifier: Apache-2.0
"""The command `torchbeast`, which runs a program by its name."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import torchbeast
from torchbeast.__main__ import MEANS, PROGRAMS, main
from torchbeast.core.base.checks import command


def test_without_a_program_it_lists_all_of_them_and_imports_no_torch() -> None:
    code = "import sys, torchbeast.__main__ as m; m.main([]); assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert all(f"  {name} " in found.stdout for name in PROGRAMS)
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_every_name_leads_to_a_program() -> None:
    assert all(find_spec(f"torchbeast.{(MEANS.get(name) or [name])[0]}") for name in PROGRAMS)


def test_test_evaluates_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as end:
        main(["test", "--savedir", str(tmp_path), "--xpid", "none"])
    assert end.value.code == 2 and "there is no checkpoint at" in capsys.readouterr().err


def test_an_unknown_program_is_refused_with_a_similar_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trian"]) == 2
    assert "no program 'trian'; did you mean train?" in capsys.readouterr().err


def test_its_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{torchbeast.__version__}\n"


def test_printed_commands_start_as_the_program_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "torchbeast"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(script), "train"])
    assert command("monobeast") == f"{script} train"
    monkeypatch.setenv("PATH", str(script.parent))
    assert command("plot") == "torchbeast plot"
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "torchbeast.monobeast"])
    assert command("monobeast").endswith(" -m torchbeast.monobeast")
