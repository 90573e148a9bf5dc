#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks at compile time, with clang, that every member is used under the lock that GUARDED_BY names
# (libtorchbeast/support/sync.h). Without clang++ on the path it uses that of the Python package
# ziglang: PYTHON's, or one installed into a temporary virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if command -v clang++ >/dev/null; then
  clang=(clang++)
else  # Zig contains a whole clang, with the compiler's own headers in lib
  python=${PYTHON:-python3}
  if ! "$python" -c 'import ziglang' 2>/dev/null; then
    "$python" -m venv "$work/venv"
    python=$work/venv/bin/python
    "$python" -m pip install -q ziglang
  fi
  zig=$("$python" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')
  clang=("$zig/zig" clang -resource-dir "$zig/lib" -x c++)
fi

read -ra grpc_flags <<<"$(pkg-config --cflags grpc++ protobuf)" || true  # may be empty
protoc --proto_path=libtorchbeast/proto --cpp_out="$work" --grpc_out="$work" \
  --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" rpcenv.proto health.proto

# check SOURCE
check() {
  "${clang[@]}" -std=c++20 -fsyntax-only -Wall -Wextra -Wthread-safety -Werror=thread-safety \
    -I. -Inest -isystem "$work" "${grpc_flags[@]}" "$1"
}

# All sources are one, which reads gRPC's headers once. Templates are checked where they are used.
{
  for source in libtorchbeast/*/*.cc; do
    case "$source" in *_test.cc | libtorchbeast/bindings/* | libtorchbeast/fuzzing/*) continue ;; esac
    echo "#include \"$source\""
  done
  cat <<'END'
#include "libtorchbeast/batching/batching_queue.h"
#include "libtorchbeast/batching/dynamic_batcher.h"
#include "libtorchbeast/batching/rollout_queue.h"
template class torchbeast::BatchingQueue<int>;
END
} >"$work/all.cc"
check "$work/all.cc"

# Proves that the check finds a mistake.
cat >"$work/mistake.cc" <<'END'
#include "libtorchbeast/support/sync.h"
struct Mistake {
  int read() { return value_; }
  torchbeast::Mutex mutex_;
  int value_ GUARDED_BY(mutex_) = 0;
};
END
if check "$work/mistake.cc" 2>/dev/null; then
  echo "clang accepted a member that is read without its lock: the check does not work" >&2
  exit 1
fi
echo "Every lock is held where it must be."
