#!/usr/bin/env bash
# Between GPUs: which exchanges, captures and buffers are right, and how fast; see bench/bench_cluster.py.
#
#   bench/cluster.sh [--only ROW,ROW] [--limit SECONDS] [--dry-run] [FILE]
#   PYTHON=python3        an interpreter whose torch has CUDA, with isoload installed
#   PROCESSES=8           of this node; default: its GPUs, in a dry run 2
#   NODES=1 NODE_RANK=0 HEAD=127.0.0.1 PORT=29511   of several nodes: the same command on each, other NODE_RANK
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" bench/bench_cluster.py "$@"
