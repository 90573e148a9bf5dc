#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the fuzzers of libtorchbeast/fuzzing with AddressSanitizer and UndefinedBehaviorSanitizer, one
# after the other. Needs a clang with libFuzzer (Debian: clang libclang-rt-dev). Builds in build/fuzz,
# where the inputs found stay for the next time; an input that fails is left there as
# crash-*, leak-*, oom-* or timeout-*.
#
# usage: scripts/fuzz.sh [SECONDS of each]     default: 60
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
clang=${CLANGXX:-clang++}
needs() {
  echo "fuzzing needs clang with libFuzzer, but $1: apt-get install clang libclang-rt-dev" >&2
  exit 2
}
command -v "$clang" >/dev/null || needs "there is no $clang"
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
  "$clang" -fsanitize=fuzzer,address,undefined -x c++ -o /dev/null - 2>/dev/null ||
  needs "$clang has none"

cmake -S . -B build/fuzz -DCMAKE_CXX_COMPILER="$clang" -DTORCHBEAST_PYTHON=OFF -DTORCHBEAST_FUZZERS=ON \
  -DTORCHBEAST_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS="-O1 -fsanitize=fuzzer-no-link" >/dev/null
cmake --build build/fuzz -j "${JOBS:-$(nproc)}" --target fuzz_codec fuzz_session

cd build/fuzz
for name in codec session; do
  mkdir -p "corpus-$name"
  # A session ends before the door's threads do, so libFuzzer's check after each input reports what they
  # still hold. The sanitizer's own check looks for leaks when the process ends.
  leaks=$([ "$name" = session ] && echo 0 || echo 1)
  # An input of 64 KiB that needs more than 512 MiB, or more than 5 s, is a fault too.
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 "./fuzz_$name" "corpus-$name" \
    -max_total_time="$seconds" -max_len=65536 -rss_limit_mb=1024 -malloc_limit_mb=512 -timeout=5 \
    -print_final_stats=1 -detect_leaks="$leaks" -close_fd_mask=3
done
echo "The fuzzers found nothing."
