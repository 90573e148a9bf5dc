#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the C++ tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under
# ThreadSanitizer. Builds in build/asan and build/tsan.
#
# usage: scripts/sanitize.sh [quick|full]     quick (the default): the tests that need no gRPC
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-quick}" in
  # Without optimisation the tests compile four times faster, but stack frames are too large for the
  # tests of small stacks.
  quick) tests=torchbeast_quick_tests optimise=-O0 filter=-*SmallStack:*DeeperNest* ;;
  full) tests=torchbeast_tests optimise=-O1 filter=* ;;
  *) echo "usage: scripts/sanitize.sh [quick|full], got '$1'" >&2; exit 2 ;;
esac

# build FOLDER SANITIZERS
build() {
  cmake -S . -B "build/$1" -DTORCHBEAST_PYTHON=OFF -DTORCHBEAST_TESTS=ON -DTORCHBEAST_SANITIZE="$2" \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_CXX_FLAGS="$optimise -D_GLIBCXX_ASSERTIONS" >/dev/null
  cmake --build "build/$1" -j "${JOBS:-$(nproc)}" --target "$tests"
}

# ThreadSanitizer of older compilers fails with today's address-space randomisation, which some
# containers cannot turn off.
fixed_addresses=(setarch -R)
"${fixed_addresses[@]}" true 2>/dev/null || fixed_addresses=()

# run FOLDER REPETITIONS
run() {
  "${fixed_addresses[@]}" "build/$1/$tests" --gtest_brief=1 --gtest_filter="$filter" \
    --gtest_repeat="$2"
}

build asan address,undefined
UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  ASAN_OPTIONS=detect_stack_use_after_return=1:allocator_may_return_null=1 run asan 1
build tsan thread
if "${fixed_addresses[@]}" "build/tsan/$tests" --gtest_list_tests 2>&1 | grep "unexpected memory mapping"; then
  echo "ThreadSanitizer is skipped: it fails with this machine's address-space randomisation" >&2
  exit 0
fi
# ThreadSanitizer keeps each address that it has suppressed and looks through them all at the next
# one: minutes for a message of 8 MiB. It need not.
tsan="suppressions=$PWD/scripts/tsan.supp:history_size=4:suppress_equal_addresses=0"
# The only signal handler is that of the tests: it prints the stacks of a program that hangs.
tsan+=":report_signal_unsafe=0"
TSAN_OPTIONS="$tsan:allocator_may_return_null=1" run tsan 3
echo "No sanitizer reported an error."
