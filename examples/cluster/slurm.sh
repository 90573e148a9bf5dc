#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# PolyBeast in one Slurm job: the learner on the first node, environment servers on all others.
#
#   sbatch examples/cluster/slurm.sh             the same command goes on with the run
#
# Before its time is over, or when it is preempted, the learner writes a checkpoint and the job goes
# back into the queue. $HOME must be the same on all nodes, and ports 50051 and following free.
#SBATCH --job-name=torchbeast
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

python=${TORCHBEAST_PYTHON:-python}
savedir=${TORCHBEAST_SAVEDIR:-$HOME/logs/torchbeast}
keys=$savedir/keys-$SLURM_JOB_ID
port=${TORCHBEAST_PORT:-50051}
cpus=${SLURM_CPUS_PER_TASK:-1}
envs=$((8 * cpus)) # of a node

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
learner=${nodes[0]}
hosts=("${nodes[@]:1}")
names=$(IFS=,; echo "${hosts[*]}")
servers=$(printf "%s:$port," "${hosts[@]}")

mkdir -p "$savedir"
"$python" -m torchbeast.keys --hosts "$names" --folder "$keys"

srun --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --cpus-per-task="$cpus" --nodelist="$names" \
  --output="$savedir/servers-$SLURM_JOB_ID-%N.log" \
  "$python" -m torchbeast.polybeast_env --env PongNoFrameskip-v4 \
  --num_servers "$cpus" --num_actors "$envs" --listen "0.0.0.0:$port" \
  --tls_cert "$keys/server.pem" --tls_key "$keys/server-key.pem" \
  --tls_client_ca "$keys/ca.pem" --token_file "$keys/token" &
serving=$!

# With a GPU on the first node: --gpus=1 here, and a job of two components (#SBATCH hetjob).
srun --nodes=1 --ntasks=1 --cpus-per-task="$cpus" --nodelist="$learner" \
  "$python" -m torchbeast.polybeast_learner --preset pong --env_servers "${servers%,}" \
  --tls_ca "$keys/ca.pem" --tls_cert "$keys/client.pem" --tls_key "$keys/client-key.pem" \
  --token_file "$keys/token" --connect_timeout 120 \
  --savedir "$savedir" --xpid "$SLURM_JOB_NAME" --suppress_logs &
learning=$!

stopped=no
trap 'stopped=yes; kill -TERM "$learning" || true' TERM # srun passes it on
code=0
wait "$learning" || code=$?
if [ "$stopped" = yes ]; then # the trap interrupted the wait
  code=0
  wait "$learning" || code=$?
fi

kill -TERM "$serving" 2>/dev/null || true
wait "$serving" || true
rm -rf "$keys"
if [ "$stopped" = yes ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
