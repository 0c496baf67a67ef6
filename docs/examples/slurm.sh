#!/bin/bash
# sbatch docs/examples/slurm.sh out/sasrec [--data ml-100k ...]
#
# From a clone on a file system that all machines see, with its environment active. Options behind the folder go
# to docs/examples/sasrec.py. A job that is started again goes on from its newest checkpoint, with any number of
# machines.
#SBATCH --job-name=tritonrec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail

folder=${1:?where do checkpoints and events go? sbatch docs/examples/slurm.sh FOLDER [OPTIONS]}
shift
export RANKS_PER_NODE=${RANKS_PER_NODE:-2}
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # `head` would end scontrol, and the job with it
MASTER_HOST=${HOSTS[0]}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a machine
export MASTER_HOST MASTER_PORT

# One task a machine: torchrun starts the ranks there. The variables are those of the task.
srun bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --master-addr "$MASTER_HOST" --master-port "$MASTER_PORT" --nproc-per-node "$RANKS_PER_NODE" \
    docs/examples/sasrec.py "$@"' task "$folder" "$@"
