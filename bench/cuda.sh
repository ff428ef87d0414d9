#!/usr/bin/env bash
# The first eleven minutes on a GPU, the cheapest proof first: builds, one op, bits, numbers, tests and sanitizers, the
# layer. No network. A step that fails does not keep the others back; the last line and the exit status tell.
#
#   bench/cuda.sh [--dry-run] [FOLDER]   FOLDER (default bench/results): results and a log of every step
#   PYTHON=python3                       an interpreter whose torch has CUDA
#
# --dry-run says what would run and, on a CPU, runs what needs no GPU: the imports, the collection of every step's
# tests, and bench_cuda.py --check on the CUDA sources compiled for a CPU. It needs `make build` and g++.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

dry=0
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
python=${PYTHON:-python3}
trap 'kill $(jobs -p) 2>/dev/null' EXIT
if [ "$dry" = 1 ]; then
  scratch=$(mktemp -d)
  trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$scratch"' EXIT
fi
folder=${1:-${scratch:-bench/results}}
mkdir -p "$folder" || exit 1
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
failed=()
limits=0
patience=900 # of what a dry run runs on a CPU, which may be busy
declare -A pids

# launch NAME SECONDS COMMAND...: in the background, at most so long; its output in FOLDER/NAME.log.
launch() {
  local name=$1 seconds=$2
  shift 2
  printf '\n== %s, at most %d s: %s\n' "$name" "$seconds" "$*"
  timeout -k 5 "$seconds" "$@" >"$folder/$name.log" 2>&1 &
  pids[$name]=$!
}

# finish NAME: waits for what was launched.
finish() {
  local name=$1 pid=${pids[$1]} status
  wait "$pid"
  status=$?
  kill -KILL -- "-$pid" 2>/dev/null # timeout leads a group: ranks that a killed test left behind end here
  printf '== %s: status %d after %d s in all\n' "$name" "$status" "$SECONDS"
  if [ "$status" -ne 0 ]; then failed+=("$name"); fi
  return "$status"
}

# run NAME SECONDS COMMAND...: here and now, its output on the screen too.
run() {
  launch "$@"
  tail -n +1 -s 0.1 --pid="${pids[$1]}" -f "$folder/$1.log"
  finish "$1"
}

# step NAME SECONDS COMMAND...: needs a GPU.
step() {
  limits=$((limits + $2))
  if [ "$dry" = 0 ]; then
    run "$@"
  else
    printf '\n== %s, at most %d s: %s\n' "$1" "$2" "${*:3}"
  fi
}

# tests NAME SECONDS PATH OPTION...: of the tests there those that need a GPU. One that hangs ends after a minute, with
# its process: see pyproject.toml.
tests() {
  local command=("$python" -m pytest -q -m cuda -rfExX -o faulthandler_timeout=60 "${@:3}")
  limits=$((limits + $2))
  if [ "$dry" = 0 ]; then
    run "$1" "$2" "${command[@]}"
  else
    run "$1" "$patience" "${command[@]}" --collect-only -qq # status 5 if there is none
  fi
}

give_up() {
  echo "FAILED: ${failed[*]}: nothing else can run"
  exit 1
}

capability='
import torch
major, minor = torch.cuda.get_device_capability()
print(f"sm_{major}{minor}" + "a" * (major >= 9))'
imports='
import numpy, pytest, rich, torch
import isoload, isoload.kernels, bench_cuda, bench_dispatch, bench_kernels
print("torch", torch.__version__, "CUDA", torch.version.cuda, isoload.__file__)
print("Triton kernels:", isoload.kernels.why_not() or "on")'
one_op='
import torch, isoload
assert isoload.count(torch.tensor([[0, 2], [2, -1]], device="cuda"), 3).tolist() == [1, 0, 2]
isoload.check_device("cuda")
print("count:", torch.cuda.get_device_name())'
simt='
import pathlib, sys
from support import simt_build
print(simt_build.build(pathlib.Path(sys.argv[1])))'

if [ "$dry" = 0 ]; then
  architecture=$("$python" -c "$capability") || { echo "no GPU that torch can use"; exit 1; }
else
  architecture=sm_90a
fi
export ISOLOAD_CUDA=1 ISOLOAD_CUDA_ARCH=$architecture
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi

step machine 10 nvidia-smi
step build 130 "$python" setup.py -q build_ext --inplace --force || give_up
limits=$((limits + 20))
run imports $((dry ? patience : 20)) env PYTHONPATH="bench:$PYTHONPATH" "$python" -c "$imports" || give_up
step one_op 20 "$python" -c "$one_op"
step check 40 "$python" bench/bench_cuda.py --check
step quick 50 "$python" bench/bench_cuda.py --quick --results "$folder"
if [ "$dry" = 1 ] || command -v ncu >/dev/null; then
  step ncu 40 ncu --profile-from-start off --set full -f -o "$folder/ncu" "$python" bench/bench_cuda.py --profile
  step ncu_details 10 ncu --import "$folder/ncu.ncu-rep" --page details
else
  printf '\n== ncu is not on PATH: no profiles\n'
fi

# Beside the tests, which use a part of the GPU only. Without the caching allocator a tensor's end is its memory's end.
sanitizers=(memcheck racecheck synccheck)
for tool in "${sanitizers[@]}"; do
  command=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20
    "$python" bench/bench_cuda.py --check)
  if [ "$dry" = 1 ]; then
    printf '\n== %s, beside the tests: %s\n' "$tool" "${command[*]}"
  elif command -v compute-sanitizer >/dev/null; then
    launch "$tool" 110 "${command[@]}"
  else
    failed+=("$tool (no compute-sanitizer on PATH)")
  fi
done
ignored=(--ignore-glob="*/test_cuda_forward.py" --ignore-glob="*/test_cuda_gradients.py")
ignored+=(--ignore-glob="*/test_cuda_symmetric.py")
tests tests 110 tests "${ignored[@]}" "${workers[@]}"
for tool in "${sanitizers[@]}"; do
  if [ -n "${pids[$tool]:-}" ] && ! finish "$tool"; then tail -n 40 "$folder/$tool.log"; fi
done
step bench 70 "$python" bench/bench_cuda.py --results "$folder"
step kernels 30 "$python" bench/bench_kernels.py --results "$folder"
dispatch=(bench/bench_dispatch.py --shapes DeepSeek-V3 gpt-oss-20b --batches 1 --rounds 2) # 8 virtual ranks
step dispatch 60 "$python" "${dispatch[@]}" --results "$folder"
tests forward 20 "$(find tests -name test_cuda_forward.py)" -s # it prints how many kernels a forward takes
tests gradients 15 "$(find tests -name test_cuda_gradients.py)"
export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 # two ranks on one GPU
tests symmetric 35 "$(find tests -name test_cuda_symmetric.py)"

if [ "$dry" = 1 ]; then
  run simt_build "$patience" env PYTHONPATH="tests:$PYTHONPATH" "$python" -c "$simt" "$scratch/simt" || give_up
  package=$(tail -n 1 "$folder/simt_build.log")
  run check_cpu "$patience" "$python" bench/bench_cuda.py --check --device cpu
  run check_simt "$patience" env PYTHONPATH="$package" "$python" bench/bench_cuda.py --check --device cpu
  run same_bits 10 diff "$folder/check_cpu.log" "$folder/check_simt.log"
  printf '\n== the limits add up to %d s' "$limits"
fi
printf '\n== %d s in all; ' "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all steps passed"
