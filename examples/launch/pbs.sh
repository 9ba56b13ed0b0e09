#!/bin/bash
# Two nodes with four GPUs each, one worker a GPU:  qsub -v DATA_DIR=/path/to/an4 pbs.sh
#PBS -N oktopk
#PBS -l select=2:ncpus=32:ngpus=4
#PBS -l walltime=01:00:00
#PBS -j oe

set -euo pipefail                  # a step that fails fails the job
cd "$PBS_O_WORKDIR"                # PBS starts in the home folder; runs/ is made where qsub was called

# The environment in which `oktopk` is installed, on a file system that all nodes see.
# module load ...
# source "$HOME/venvs/oktopk/bin/activate"

: "${DATA_DIR:?say where the data is: qsub -v DATA_DIR=... pbs.sh}"

WORKERS_PER_NODE=4
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)      # the file has a line for each slot, not for each node

# The host of rank 0. It is set here, because only this node is sure to have the file that PBS_NODEFILE names.
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
# A port from the job's number, so that two jobs on one node have two.
MASTER_PORT=$((20000 + ${PBS_JOBID%%[!0-9]*} % 12000))
export MASTER_ADDR MASTER_PORT

# The network to use, if a node has several and the first one is not it (`ip -brief address` lists them).
# export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0

# This is the mpiexec of PALS (HPE). It passes the environment on to the workers, as MPICH's does. With Open MPI:
#   mpiexec -np N --map-by ppr:4:node -x MASTER_ADDR -x MASTER_PORT oktopk train ...
# --depth and --cpu-bind give each worker cores of its own for its threads.
mpiexec -n $((NODES * WORKERS_PER_NODE)) --ppn "$WORKERS_PER_NODE" --depth 8 --cpu-bind depth \
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
    --name "lstman4-${PBS_JOBID%%.*}"
