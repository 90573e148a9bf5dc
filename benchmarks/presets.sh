#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a preset with several seeds, one after the other, and evaluates each run twice over 100 whole
# episodes: greedily, into evaluation.txt in the run's folder, and with sampled actions, into
# evaluation-sampled.txt. Complete runs are skipped, so that the same command continues after an
# interruption. Use seeds that the settings were not tuned on.
# usage: benchmarks/presets.sh PROGRAM PRESET [SEEDS]      (default "11 12 13")
#        RUNS=FOLDER (default ~/logs/torchbeast/presets), FLAGS="more flags", EPISODES=100
set -euo pipefail
program=$1 preset=$2 seeds=${3:-11 12 13}
runs=${RUNS:-$HOME/logs/torchbeast/presets}
python=${PYTHON:-python}
evaluate() { # FILE [FLAGS]
  "$python" -m "torchbeast.$program" "${run[@]}" --mode test --num_episodes "${EPISODES:-100}" --seed 1 "${@:2}" \
    >"$runs/$preset-$program-$seed/$1"
  echo "$preset $program $seed, $1: $(grep -h "^Mean\|^Distinct" "$runs/$preset-$program-$seed/$1" | tr '\n' ' ')"
}
for seed in $seeds; do
  run=(--savedir "$runs" --xpid "$preset-$program-$seed")
  # shellcheck disable=SC2086
  "$python" -m "torchbeast.$program" "${run[@]}" --preset "$preset" --seed "$seed" ${FLAGS:-} |
    { grep -a "^Trained for\|^Mean return" || true; } # a failed training ends this script before any evaluation
  evaluate evaluation.txt
  evaluate evaluation-sampled.txt --sampled
done
