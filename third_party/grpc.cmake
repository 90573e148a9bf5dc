# SPDX-License-Identifier: Apache-2.0
#
# Finds gRPC, protobuf and their compilers: through their CMake packages, else through pkg-config.
# Defines the target torchbeast_grpc and the variables TORCHBEAST_PROTOC, TORCHBEAST_GRPC_PLUGIN.

set(_grpc_help "
  gRPC's and protobuf's C++ development files are needed to build TorchBeast. Install them with
    Debian, Ubuntu:  sudo apt-get install libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler pkg-config cmake g++
    macOS:           brew install grpc protobuf pkg-config cmake
  and run the same command again.")

add_library(torchbeast_grpc INTERFACE)

find_package(Protobuf CONFIG QUIET)
if(Protobuf_FOUND)
  find_package(gRPC CONFIG QUIET)
endif()
if(gRPC_FOUND)
  target_link_libraries(torchbeast_grpc INTERFACE gRPC::grpc++ protobuf::libprotobuf)
else()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(GRPC QUIET IMPORTED_TARGET grpc++ protobuf)
  endif()
  if(NOT GRPC_FOUND)
    message(FATAL_ERROR "gRPC for C++ was not found.${_grpc_help}")
  endif()
  target_link_libraries(torchbeast_grpc INTERFACE PkgConfig::GRPC)
endif()

find_program(TORCHBEAST_PROTOC protoc)
find_program(TORCHBEAST_GRPC_PLUGIN grpc_cpp_plugin)
if(NOT TORCHBEAST_PROTOC OR NOT TORCHBEAST_GRPC_PLUGIN)
  message(FATAL_ERROR "protoc or grpc_cpp_plugin was not found.${_grpc_help}")
endif()
