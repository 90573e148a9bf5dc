#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# PolyBeast in one Slurm job: the learner runs on the first node, and all other nodes dial in to it.
#
#   sbatch examples/cluster/slurm.sh             the same command resumes the run
#
# Shortly before the job's time is over, the learner writes a checkpoint and the job goes back into
# the queue. Slurm also requeues a job that it preempts, if it is configured to do so. scancel ends
# the job after a checkpoint. $HOME must be the same on all nodes, and port 50050 of the first node
# must be free.
#SBATCH --job-name=torchbeast
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

python=${TORCHBEAST_PYTHON:-python}
savedir=${TORCHBEAST_SAVEDIR:-$HOME/logs/torchbeast}
keys=$savedir/keys-$SLURM_JOB_ID
port=${TORCHBEAST_PORT:-50050}
cpus=${SLURM_CPUS_PER_TASK:-1}
envs=$((8 * cpus)) # per node

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
hosts=("${nodes[@]:1}")
names=$(IFS=,; echo "${hosts[*]}")
learner=${nodes[0]}

mkdir -p "$savedir"
rm -rf "$keys" # left by this job, if it was killed
trap 'rm -rf "$keys"' EXIT
"$python" -m torchbeast.keys --hosts "$learner" --folder "$keys"
rm "$keys/ca-key.pem" # nothing else will be signed

srun --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --cpus-per-task="$cpus" --nodelist="$names" \
  --output="$savedir/servers-$SLURM_JOB_ID-%N.log" \
  "$python" -m torchbeast.polybeast_env --env PongNoFrameskip-v4 \
  --num_servers "$cpus" --num_envs "$envs" --learner "$learner:$port" \
  --tls_ca "$keys/ca.pem" --tls_cert "$keys/client.pem" --tls_key "$keys/client-key.pem" \
  --token_file "$keys/token" &
serving=$!

signals=0 requeue=no learning=
# shellcheck disable=SC2317 # called by the traps
stop() {
  signals=$((signals + 1))
  [ -z "$learning" ] || kill -TERM "$learning" || true
}
trap 'requeue=yes && stop' USR1 # the time is nearly over
trap stop TERM                  # scancel, or preempted

# The learner is not started by srun, which kills its tasks immediately when it gets SIGTERM. This
# script runs on the first node. For a GPU there, use a job of two components (#SBATCH hetjob), the
# first one with --gpus=1.
"$python" -m torchbeast.polybeast_learner --preset pong --listen "0.0.0.0:$port" \
  --tls_cert "$keys/server.pem" --tls_key "$keys/server-key.pem" \
  --tls_client_ca "$keys/ca.pem" --token_file "$keys/token" --connect_timeout 120 \
  --savedir "$savedir" --xpid "$SLURM_JOB_NAME" --suppress_logs &
learning=$!
[ "$signals" = 0 ] || kill -TERM "$learning" || true # the signal came too early for stop

before=-1
while [ "$signals" != "$before" ]; do # a signal interrupts the wait
  before=$signals code=0
  wait "$learning" || code=$?
done

scancel --quiet --ctld --signal=TERM "$SLURM_JOB_ID.0" || true # ends the servers
wait "$serving" || true
if [ "$requeue" = yes ] && [ "$code" = 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
