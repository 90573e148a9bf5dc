# SPDX-License-Identifier: Apache-2.0
#
# Finds gRPC, protobuf and their compilers through their CMake packages, else through pkg-config.
# Defines the target torchbeast_grpc and the variables TORCHBEAST_PROTOC, TORCHBEAST_GRPC_PLUGIN.

# The oldest versions known to pass the C++ tests: those of Ubuntu 22.04 and Debian 11.
set(_grpc_minimum 1.30)
set(_protobuf_minimum 3.12)

set(_grpc_help "
  gRPC's and protobuf's C++ development files are needed to build TorchBeast. Install them with
    Debian, Ubuntu:  sudo apt-get install libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev pkg-config cmake g++
    macOS:           brew install grpc protobuf abseil pkg-config cmake
  and run the same command again.")

add_library(torchbeast_grpc INTERFACE)

find_package(Protobuf CONFIG QUIET)
if(Protobuf_FOUND)
  find_package(gRPC CONFIG QUIET)
endif()
if(gRPC_FOUND)
  target_link_libraries(torchbeast_grpc INTERFACE gRPC::grpc++ protobuf::libprotobuf)
  set(_grpc_version ${gRPC_VERSION})
  set(_protobuf_version ${Protobuf_VERSION})
else()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(GRPC QUIET IMPORTED_TARGET grpc++ protobuf)
  endif()
  if(NOT GRPC_FOUND)
    message(FATAL_ERROR "gRPC for C++ was not found.${_grpc_help}")
  endif()
  target_link_libraries(torchbeast_grpc INTERFACE PkgConfig::GRPC)
  set(_grpc_version ${GRPC_grpc++_VERSION})
  set(_protobuf_version ${GRPC_protobuf_VERSION})
endif()

function(_require_version name version minimum)
  if(version VERSION_LESS minimum)
    message(FATAL_ERROR "TorchBeast needs ${name} >= ${minimum}, found ${version}. Install a newer "
                        "one and run the same command again; if it is installed outside the "
                        "system's folders, name its prefix: CMAKE_PREFIX_PATH=/its/prefix (and "
                        "PKG_CONFIG_PATH=/its/prefix/lib/pkgconfig).")
  endif()
endfunction()
_require_version(gRPC "${_grpc_version}" ${_grpc_minimum})
_require_version(protobuf "${_protobuf_version}" ${_protobuf_minimum})

# ---- The compilers, from the same packages as the headers, not the first on the PATH ------------

# Sets `variable` to the program `name`: a package's target, else from its bin folder, else from the
# PATH.
function(_find_compiler variable name target package)
  if(gRPC_FOUND AND TARGET ${target})
    get_target_property(program ${target} LOCATION)
    set(${variable} ${program} CACHE FILEPATH "${name}")
  elseif(NOT gRPC_FOUND)
    pkg_get_variable(prefix ${package} prefix)
    find_program(${variable} ${name} HINTS ${prefix}/bin NO_DEFAULT_PATH)
  endif()
  find_program(${variable} ${name})
  if(NOT ${variable})
    message(FATAL_ERROR "${name} was not found.${_grpc_help}")
  endif()
endfunction()
_find_compiler(TORCHBEAST_PROTOC protoc protobuf::protoc protobuf)
_find_compiler(TORCHBEAST_GRPC_PLUGIN grpc_cpp_plugin gRPC::grpc_cpp_plugin grpc++)

# "libprotoc 25.1" belongs to the headers of 25.1.0, which CMake's package calls 4.25.1.
execute_process(COMMAND ${TORCHBEAST_PROTOC} --version OUTPUT_VARIABLE _protoc_version ERROR_QUIET)
string(REGEX MATCH "[0-9]+(\\.[0-9]+)+" _protoc_version "${_protoc_version}")
string(FIND ".${_protobuf_version}." ".${_protoc_version}." _protoc_belongs)
if(NOT _protoc_version OR _protoc_belongs EQUAL -1)
  message(FATAL_ERROR "${TORCHBEAST_PROTOC} is of protobuf ${_protoc_version}, the headers are of "
                      "${_protobuf_version}. Install both from one source, or name the protoc that "
                      "belongs to the headers: cmake -DTORCHBEAST_PROTOC=/path/to/protoc (and "
                      "-DTORCHBEAST_GRPC_PLUGIN=/path/to/grpc_cpp_plugin).")
endif()
