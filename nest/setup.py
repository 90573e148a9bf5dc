# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled module `nest` alone: `pip install nest/`."""

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "nest",
            sources=["nest/nest_pybind.cc"],
            depends=["nest/nest.h", "nest/nest_pybind.h"],
            include_dirs=["."],
            cxx_std=20,
        )
    ],
    cmdclass={"build_ext": build_ext},
)
