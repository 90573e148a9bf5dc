#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a preset with several seeds, one after the other, and evaluates each: 100 whole episodes with
# the most likely actions, into evaluation.txt in the run's folder. What is complete is left out, so
# that the same command goes on after an interruption.
# usage: benchmarks/presets.sh PROGRAM PRESET [SEEDS]      (default "1 2 3")
#        RUNS=FOLDER (default ~/logs/torchbeast/presets), FLAGS="more flags", EPISODES=100
set -euo pipefail
program=$1 preset=$2 seeds=${3:-1 2 3}
runs=${RUNS:-$HOME/logs/torchbeast/presets}
python=${PYTHON:-python}
for seed in $seeds; do
  run=(--savedir "$runs" --xpid "$preset-$program-$seed")
  # shellcheck disable=SC2086
  "$python" -m "torchbeast.$program" "${run[@]}" --preset "$preset" --seed "$seed" ${FLAGS:-} |
    { grep -a "^Learnt" || true; } # a training that fails ends this script: nothing of it is evaluated
  "$python" -m "torchbeast.$program" "${run[@]}" --mode test --num_episodes "${EPISODES:-100}" --seed 1 \
    >"$runs/$preset-$program-$seed/evaluation.txt"
  echo "$preset $program $seed: $(grep "^Mean" "$runs/$preset-$program-$seed/evaluation.txt")"
done
