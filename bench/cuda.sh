#!/usr/bin/env bash
# Builds for this machine's GPU, tests, times, and runs the kernels under compute-sanitizer: minutes, no network.
# A check that fails does not keep the numbers back; the last line and the exit status tell. The limits of the steps
# add up to ten minutes.
#
#   bench/cuda.sh [--dry-run] [FOLDER]   FOLDER (default bench/results): bench_cuda.jsonl and logs of the steps
#   PYTHON=python3                       an interpreter whose torch has CUDA
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

dry=0
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
folder=${1:-bench/results}
python=${PYTHON:-python3}
mkdir -p "$folder" || exit 1
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
failed=()

# step NAME SECONDS COMMAND...: at most so long; its output also in FOLDER/NAME.log.
step() {
  local name=$1 seconds=$2 start=$SECONDS status
  shift 2
  printf '\n== %s: %s\n' "$name" "$*"
  if [ "$dry" = 1 ]; then return 0; fi
  timeout "$seconds" "$@" 2>&1 | tee "$folder/$name.log"
  status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then failed+=("$name"); fi
  printf '== %s: status %d, %d s\n' "$name" "$status" "$((SECONDS - start))"
  return "$status"
}

capability='
import torch
major, minor = torch.cuda.get_device_capability()
print(f"sm_{major}{minor}" + "a" * (major >= 9))'
if [ "$dry" = 1 ]; then
  architecture=sm_90a
else
  architecture=$("$python" -c "$capability") || { echo "no GPU that torch can use"; exit 1; }
fi
export ISOLOAD_CUDA=1 ISOLOAD_CUDA_ARCH=$architecture
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi
tests=(tests/ops/test_cuda.py tests/layer/test_cuda_layer.py tests/ops/test_device_errors.py tests/experts/test_kernels_cuda.py)
for op in count replica_tables plan_exact plan_exact_objectives plan_exact_pour plan_active plan_lp round_split plan_spill \
  share share_alone route plan_waterfill route_shared route_shared_sampled append_shared_expert; do
  tests+=("tests/ops/test_$op.py")
done

step machine 10 nvidia-smi
step build 160 "$python" setup.py -q build_ext --inplace --force || { [ "$dry" = 1 ] || exit 1; }
step tests 130 "$python" -m pytest -q -m cuda -rfExX "${workers[@]}" "${tests[@]}"
step bench 90 "$python" bench/bench_cuda.py --results "$folder"
step kernels 30 "$python" bench/bench_kernels.py
# Last, being slow. Without the caching allocator a tensor's end is its memory's end.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
if [ "$dry" = 1 ] || command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck; do
    step "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
      "$python" bench/bench_cuda.py --check
  done
else
  failed+=("compute-sanitizer (not found)")
fi

printf '\n== %d s in all; ' "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all steps passed"
