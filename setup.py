# SPDX-License-Identifier: Apache-2.0
"""Builds the modules nest and libtorchbeast._C with CMake; everything else is in pyproject.toml.

TORCHBEAST_PYTHON_ONLY=1 pip install .    builds neither: MonoBeast needs no compiler and no gRPC
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
MODULES = ("nest", "libtorchbeast._C")
PYTHON_ONLY = os.environ.get("TORCHBEAST_PYTHON_ONLY", "0") not in ("", "0")


class CMakeBuild(build_ext):
    """Runs CMake once and puts each module where setuptools wants it."""

    def run(self) -> None:
        if self.extensions:
            self.build_all()
        super().run()

    def build_all(self) -> None:
        build = self.cmake_folder()
        build.mkdir(parents=True, exist_ok=True)
        # Unity: many files at a time. Most of a file's time is gRPC's headers.
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DTORCHBEAST_TESTS=OFF",
            "-DCMAKE_UNITY_BUILD=ON",
            "-DCMAKE_UNITY_BUILD_BATCH_SIZE=13",
        ]
        self.cmake("-S", str(ROOT), "-B", str(build), *arguments)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        self.cmake("--build", str(build), "-j", jobs)

    def build_extension(self, ext: Extension) -> None:
        build = self.cmake_folder()
        wanted = Path(self.get_ext_fullpath(ext.name)).resolve()
        wanted.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(self.built_module(build, ext.name)), str(wanted))

    def built_module(self, build: Path, name: str) -> Path:
        return build / Path(self.get_ext_filename(name)).name

    def cmake_folder(self) -> Path:
        return Path(self.build_temp).resolve() / "cmake"

    def cmake(self, *arguments: str) -> None:
        try:
            subprocess.run(["cmake", *arguments], check=True)
        except FileNotFoundError:
            sys.exit("error: cmake was not found; run 'pip install cmake'")
        except subprocess.CalledProcessError as error:
            sys.exit(
                "error: the build of TorchBeast's C++ part failed (cmake exited with "
                f"{error.returncode}); its own messages above say what is missing. "
                "MonoBeast and RayBeast do not need it; to skip it: TORCHBEAST_PYTHON_ONLY=1 pip "
                "install ."
            )


setup(
    ext_modules=[] if PYTHON_ONLY else [Extension(name, sources=[]) for name in MODULES],
    cmdclass={"build_ext": CMakeBuild},
)
