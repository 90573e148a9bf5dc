#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# PolyBeast on Pong with the shallow and the deep network, in turn, three times: steps/s of each run.
# usage: benchmarks/programs.sh [STEPS]      (default 20000)
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-20000}
python=${PYTHON:-.venv/bin/python}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
for repeat in 1 2 3; do
  for model in shallow deep; do
    echo -n "$model $repeat: "
    "$python" -m torchbeast.polybeast --env PongNoFrameskip-v4 --model "$model" --num_actors 32 \
      --unroll_length 20 --batch_size 32 --total_steps "$steps" --savedir "$runs" \
      --xpid "$model-$repeat" --disable_checkpoint | grep -o "Learnt .*(.*)"
  done
done
