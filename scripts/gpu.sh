#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds, tests and measures TorchBeast on a machine with an NVIDIA GPU, in less than ten minutes.
# It needs no network. FOLDER then has gpu.md, a page; gpu.json, every figure; and a log of each part.
# A part that fails does not stop the others, and the exit code is 1.
#
# usage: scripts/gpu.sh FOLDER     PYTHON=python3.12 chooses the Python, which has requirements.txt,
#                                  pytest, pytest-xdist and pybind11; the system has cmake and gRPC
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: scripts/gpu.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(realpath "$1")
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  { echo "PyTorch finds no GPU: docs/how-to/troubleshooting.md has the usual reasons" >&2; exit 2; }
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
: >"$folder/parts"

# part NAME LIMIT COMMAND...: runs a command for at most LIMIT seconds; output goes to NAME.log
part() {
  local name=$1 limit=$2 code=0 start=$SECONDS
  shift 2
  timeout --signal INT --kill-after 10 "$limit" "$@" >"$folder/$name.log" 2>&1 || code=$?
  echo "$name $code $((SECONDS - start))" | tee -a "$folder/parts"
}

bench() {
  local name=$1
  shift
  part "bench-$name" 90 "$PYTHON" -m torchbeast.bench --env PongNoFrameskip-v4 --num_envs 128 \
    --batch_size 32 --unroll_length 20 --seconds 2 --repeats 1 --json "$folder/bench-$name.json" "$@"
}

tests=("$PYTHON" -m pytest -q -p no:cacheprovider -m "not long and not families")

part build 180 "$PYTHON" setup.py build_ext --inplace
export OMP_NUM_THREADS=1
part tests-gpu 120 "${tests[@]}" --gpu --no-skips tests/learner/test_on_gpu.py \
  tests/core/test_cuda_stream.py tests/core/actors/test_cuda_graphs.py
unset OMP_NUM_THREADS
bench shallow --model shallow
bench deep --model deep
bench deep-lstm --model deep --use_lstm
bench shallow-cpu --model shallow --disable_cuda
bench deep-cpu --model deep --disable_cuda
# Each of two learners has a GPU of its own (nccl), or both share the only one (gloo).
shared=()
[ "$gpus" -gt 1 ] || shared=(--device cuda:0)
"$PYTHON" -m torchbeast.polybeast_env --env CartPole-v1 --num_servers 4 --num_envs 32 \
  >"$folder/servers.log" 2>&1 &
servers=$!
part ranks 90 "$PYTHON" -m torch.distributed.run --nproc_per_node 2 -m torchbeast.polybeast_learner \
  --num_envs 32 --env CartPole-v1 --total_steps 100000 --savedir "$folder/runs" --xpid ranks "${shared[@]}"
kill -INT "$servers" && wait "$servers" || true
export OMP_NUM_THREADS=1
part tests-programs 120 "${tests[@]}" --gpu -n 8 --dist loadscope tests/integration/test_algorithms.py \
  tests/integration/test_monobeast.py tests/integration/test_ppo_programs.py \
  tests/integration/test_off_policy_programs.py tests/integration/test_two_terminals.py

"$PYTHON" benchmarks/gpu_page.py "$folder"
! awk '$2 != 0 { failed = 1 } END { exit !failed }' "$folder/parts"
