# SPDX-License-Identifier: Apache-2.0
#
# Finds Abseil, which gRPC depends on. Defines the target torchbeast_absl.

add_library(torchbeast_absl INTERFACE)

find_package(absl CONFIG QUIET)
if(absl_FOUND)
  target_link_libraries(torchbeast_absl INTERFACE absl::inlined_vector)
else()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(ABSL QUIET IMPORTED_TARGET absl_inlined_vector)
  endif()
  if(NOT ABSL_FOUND)
    message(FATAL_ERROR "Abseil's development files were not found. Install them with\n"
                        "  Debian, Ubuntu:  sudo apt-get install libabsl-dev\n"
                        "  macOS:           brew install abseil\n"
                        "and run the same command again.")
  endif()
  target_link_libraries(torchbeast_absl INTERFACE PkgConfig::ABSL)
endif()
