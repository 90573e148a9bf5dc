# SPDX-License-Identifier: Apache-2.0
#
# Finds pybind11 in the Python interpreter of the build, which setup.py passes.

set(PYBIND11_FINDPYTHON ON)
find_package(Python COMPONENTS Interpreter Development.Module REQUIRED)
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
                OUTPUT_VARIABLE _pybind11_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
find_package(pybind11 3.0 CONFIG QUIET HINTS ${_pybind11_dir})
if(NOT pybind11_FOUND)
  message(FATAL_ERROR "pybind11 >= 3.0 was not found for ${Python_EXECUTABLE}; run\n"
                      "  ${Python_EXECUTABLE} -m pip install 'pybind11>=3'")
endif()
