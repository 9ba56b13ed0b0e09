#!/bin/bash
# Two nodes with four GPUs each, one worker a GPU:  sbatch --export=ALL,DATA_DIR=/path/to/an4 slurm.sh
#SBATCH --job-name=oktopk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4        # workers on each node
#SBATCH --gpus-per-node=4          # as many as workers; leave it out to train on the CPU
#SBATCH --cpus-per-task=8          # threads of each worker, if SLURM binds tasks to their cores
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail                  # a step that fails fails the job

# The environment in which `oktopk` is installed, on a file system that all nodes see.
# module load ...
# source "$HOME/venvs/oktopk/bin/activate"

: "${DATA_DIR:?say where the data is: sbatch --export=ALL,DATA_DIR=... slurm.sh}"

# The network to use, if a node has several and the first one is not it (`ip -brief address` lists them).
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# Since SLURM 22.05 srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# --kill-on-bad-exit: when a worker dies the others end at once, not after their timeout.
# oktopk reads rank, world size and the first host from the variables of srun: no --nproc here.
# --name: all workers write into one folder, which all nodes must see.
srun --kill-on-bad-exit=1 \
    oktopk train \
    --dnn lstman4 \
    --dataset an4 \
    --data-dir "$DATA_DIR" \
    --batch-size 8 \
    --lr 0.001 \
    --compressor oktopk \
    --density 0.02 \
    --max-epochs 60 \
    --runs runs \
    --name "lstman4-$SLURM_JOB_ID"
