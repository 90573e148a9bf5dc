# SPDX-License-Identifier: Apache-2.0
"""Paths that cannot be used end a program with one line, and printed commands are read back."""

from __future__ import annotations

import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import DNSName
from keys_of_tests import Keys
from later import later

from torchbeast import keys, polybeast_env
from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastEnvFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags, words_of
from torchbeast.compare import CompareFlags
from torchbeast.core.base.checks import names_with
from torchbeast.errors import EXIT_DONE, EXIT_USAGE, exit_code_of
from torchbeast.plot import PlotFlags
from torchbeast.reporting.display import next_commands

LONG = "x" * 300
HOMELESS = "~no.such.user/a"  # expanded as ~ is for a user without HOME and entry in passwd
TCP, SWEEP = ["--listen", "localhost:1", "--insecure"], ["--set", "seed=1"]
UNUSABLE = [
    ("monobeast", ["--xpid", LONG]),
    ("monobeast", ["--savedir", LONG, "--xpid", "a"]),
    ("monobeast", ["--savedir", HOMELESS]),
    ("monobeast", ["--mode", "test", "--savedir", LONG]),
    ("monobeast", ["--mode", "test", "--follow", "--xpid", LONG]),
    ("raybeast", ["--savedir", HOMELESS, "--xpid", "a"]),
    ("polybeast_learner", ["--savedir", HOMELESS]),
    ("polybeast_learner", ["--env_servers", "a:1", "--tls_ca", HOMELESS]),
    ("polybeast_env", [*TCP, "--token_file", HOMELESS]),
    ("polybeast_env", [*TCP, "--token_file", LONG]),
    ("status", ["a:1", "--tls_ca", HOMELESS]),
    ("keys", ["--hosts", "a", "--folder", HOMELESS]),
    ("keys", ["--hosts", "a", "--folder", LONG]),
    ("plot", [LONG]),
    ("plot", ["a.link.to.itself"]),
    ("sweep.__main__", [*SWEEP, "--name", LONG]),
    ("sweep.__main__", [*SWEEP, "--savedir", HOMELESS]),
    ("bench", ["--json", LONG]),
    ("bench", ["--png", f"{LONG}.png"]),
]


@pytest.mark.parametrize(("program", "args"), UNUSABLE)
def test_a_path_that_cannot_be_used_ends_a_program_with_one_line_that_names_it(
    program: str,
    args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "logs" / "torchbeast").mkdir(parents=True)  # of runs without --savedir
    (tmp_path / "a.link.to.itself").symlink_to("a.link.to.itself")
    assert importlib.import_module(f"torchbeast.{program}").main(args) == EXIT_USAGE
    said = capsys.readouterr().err
    assert args[-1] in said and said.count("\n") == 1


@pytest.mark.parametrize(("program", "kind"), [("plot", PlotFlags), ("compare", CompareFlags)])
def test_a_quoted_home_directory_in_output_is_expanded(
    program: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = parse(kind, program, ["run", "--output", "~/o.png", "o.json"])
    assert flags.output == (tmp_path / "o.png", Path("o.json"))


AWKWARD = ["-x", "--xpid", 'it\'s "$HOME" *;#& käse', os.fsdecode(b"caf\xe9")]
FLAGS: dict[str, Any] = {
    "monobeast": MonoBeastFlags,
    "plot": PlotFlags,
    "polybeast_env": PolyBeastEnvFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
}


def read_back(said: str) -> list[Any]:
    """Returns the flags of each printed command, as a shell and the program's parser read it."""
    commands = re.findall(r"-m torchbeast\.(\w+) ((?:.*\\\n)*.*)", said)
    return [_parsed(program, _words(typed)) for program, typed in commands]


def _words(typed: str) -> list[str]:
    command = ["sh", "-c", f"printf '%s\\0' {typed}"]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    return os.fsdecode(printed).split("\0")[:-1]


def _parsed(program: str, words: Sequence[str]) -> Any:
    return parse(FLAGS[program], program, words)


@pytest.mark.parametrize("name", [*(later(name) for name in AWKWARD[:2]), *AWKWARD[2:]])
def test_printed_commands_are_read_back_by_the_program_that_prints_them(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name / name
    settings = {"token_file": name, "env_servers": "a:1", "tls_ca": f"{name}/ca.pem"}
    more = words_of(settings, names_with("connection", PolyBeastLearnerFlags))
    plotted, tested, again = read_back(next_commands("monobeast", folder, True))
    (*_, resumed) = read_back(next_commands("polybeast_learner", folder, True, to_resume=more))
    assert plotted.runs == (folder,)
    assert tested.run.folder == again.run.folder == resumed.run.folder == folder
    assert resumed.security.token_file == name
    assert resumed.security.tls_ca == f"{name}/ca.pem"

    cert, key = Keys(tmp_path / name).server([DNSName("a")], name="server")
    args = [f"--tls_cert={cert}", f"--tls_key={key}", "--listen=a:1", f"--token_file={name}"]
    server = parse(PolyBeastEnvFlags, "polybeast_env", args)
    (learner,) = read_back(polybeast_env._serving(server, ["a:1"], 1))
    assert learner.security.token_file == "token" and learner.security.tls_ca == "ca.pem"
    for words in ([], ["--pipes_basename", "unix:/tmp/a"]):
        server = parse(PolyBeastEnvFlags, "polybeast_env", ["--selfplay", name, *words])
        (learner,) = read_back(polybeast_env._serving(server, ["a:1"], 1))
        assert learner.environment.selfplay == server.environment.selfplay
        assert learner.fleet.pipes_basename == server.servers.pipes_basename


def test_the_flags_that_come_with_new_keys_are_read_back() -> None:
    said = keys._what_goes_where(Path("a"), 365)
    words = shlex.split(said[said.index("--listen") :].replace("\\\n", ""))
    listens = parse(PolyBeastEnvFlags, "polybeast_env", words[: words.index("token") + 1])
    assert listens.security.tls_cert == "server.pem" and listens.security.token_file == "token"


def test_a_name_that_is_not_utf_8_is_printed_as_the_shell_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "utf-8", errors="strict"))

    def run() -> int:
        print(os.fsdecode(b"caf\xe9"), flush=True)
        return EXIT_DONE

    assert exit_code_of("plot", run) == EXIT_DONE
    assert printed.getvalue() == b"caf\xe9\n"
