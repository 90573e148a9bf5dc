# SPDX-License-Identifier: Apache-2.0
"""The messages of CMake about tools and libraries that do not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from later import later

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("pkg-config") is None,
    reason="the C++ part is not built here: no cmake or no pkg-config",
)

# The compiler need not be tried: nothing is built here.
QUICK = ("-DTORCHBEAST_PYTHON=OFF", "-DCMAKE_CXX_COMPILER_WORKS=1")
# gRPC through pkg-config, whose files are easily forged.
PKG_CONFIG = "-DCMAKE_DISABLE_FIND_PACKAGE_Protobuf=ON"


def configure(build: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cmake", "-S", ROOT, "-B", build, *QUICK, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """Returns the text of the error that ended CMake, on one line."""
    assert result.returncode != 0, result.stdout
    return " ".join(result.stderr.split())


def script(path: Path, words: str) -> Path:
    """Writes a program that prints `words`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {words}\n")
    path.chmod(0o755)
    return path


def forged_packages(prefix: Path, grpc: str, protobuf: str) -> dict[str, str]:
    """Writes pkg-config files of gRPC and protobuf; returns the variable that shows them."""
    folder = prefix / "pkgconfig"
    folder.mkdir(parents=True)
    for name, version in {"grpc++": grpc, "protobuf": protobuf}.items():
        text = f"prefix={prefix}\nName: {name}\nDescription: forged\nVersion: {version}\nLibs:\n"
        (folder / f"{name}.pc").write_text(text)
    return {"PKG_CONFIG_PATH": str(folder)}


def test_protoc_and_plugin_come_from_the_package_of_the_headers(tmp_path: Path) -> None:
    first = script(tmp_path / "first" / "protoc", "libprotoc 2.6.1").parent
    script(first / "grpc_cpp_plugin", "")
    environment = forged_packages(tmp_path / "prefix", grpc="1.60.0", protobuf="25.1.0")
    protoc = script(tmp_path / "prefix" / "bin" / "protoc", "libprotoc 25.1")
    plugin = script(tmp_path / "prefix" / "bin" / "grpc_cpp_plugin", "")
    environment["PATH"] = f"{first}{os.pathsep}{os.environ['PATH']}"
    result = configure(tmp_path / "build", PKG_CONFIG, **environment)
    assert result.returncode == 0, result.stderr
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert f"TORCHBEAST_PROTOC:FILEPATH={protoc}\n" in cache
    assert f"TORCHBEAST_GRPC_PLUGIN:FILEPATH={plugin}\n" in cache


# 25.1 is the beginning of 25.12, and still another version.
@pytest.mark.parametrize("version", [later("2.6.1"), "25.12", later("25.10")])
def test_a_protoc_of_another_version_is_refused_with_both_versions(
    tmp_path: Path, version: str
) -> None:
    environment = forged_packages(tmp_path / "prefix", grpc="1.60.0", protobuf="25.1.0")
    protoc = script(tmp_path / "other" / "protoc", f"libprotoc {version}")
    chosen = f"-DTORCHBEAST_PROTOC={protoc}"
    said = complaint(configure(tmp_path / "build", PKG_CONFIG, chosen, **environment))
    assert f"{protoc} is of protobuf {version}, the headers are of 25.1.0." in said
    assert "-DTORCHBEAST_PROTOC=/path/to/protoc" in said


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"grpc": "1.29.1", "protobuf": "3.12.4"}, "needs gRPC >= 1.30, found 1.29.1"),
        ({"grpc": "1.30.2", "protobuf": "3.11.4"}, "needs protobuf >= 3.12, found 3.11.4"),
    ],
)
def test_a_library_that_is_too_old_is_refused_with_a_message(
    tmp_path: Path, versions: dict[str, str], sentence: str
) -> None:
    environment = forged_packages(tmp_path / "prefix", **versions)
    said = complaint(configure(tmp_path / "build", PKG_CONFIG, **environment))
    assert sentence in said
    assert "PKG_CONFIG_PATH=/its/prefix/lib/pkgconfig" in said


@pytest.mark.parametrize(("kind", "version"), [("GNU", "9.4.0"), ("Clang", "12.0.1")])
def test_a_compiler_that_is_too_old_is_refused_with_a_message(
    tmp_path: Path, kind: str, version: str
) -> None:
    claimed = {"ID": kind, "VERSION": version, "ID_RUN": "1", "FORCED": "1"}
    arguments = [f"-DCMAKE_CXX_COMPILER_{key}={value}" for key, value in claimed.items()]
    said = complaint(configure(tmp_path / "build", *arguments))
    assert "needs g++ >= 10 or clang >= 13" in said
    assert f"({kind} {version})" in said
    assert "CXX=g++-12" in said
