# SPDX-License-Identifier: Apache-2.0
#
# Finds GoogleTest on the system. Defines the target torchbeast_googletest.

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(FATAL_ERROR "GoogleTest was not found. Install it with\n"
                      "  Debian, Ubuntu:  sudo apt-get install libgtest-dev\n"
                      "  macOS:           brew install googletest")
endif()
add_library(torchbeast_googletest INTERFACE)
target_link_libraries(torchbeast_googletest INTERFACE GTest::gtest GTest::gtest_main)
