#!/usr/bin/env bash
# make gpu: everything on a machine with a GPU, in parts; see bench/gpu_run.py and bench/README.md.
#
#   bench/cuda.sh [--part N] [--dry-run] [FOLDER]
#   PYTHON=python3    an interpreter whose torch has CUDA
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" bench/gpu_run.py "$@"
