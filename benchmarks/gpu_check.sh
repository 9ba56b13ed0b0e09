#!/usr/bin/env bash
# Check the device path on one NVIDIA GPU and time it, in at most eight minutes. Logs go to $OUT, a table comes last.
#
#     OUT=logs benchmarks/gpu_check.sh
#
# It needs torch with CUDA, triton, pytest, pytest-timeout, hypothesis and rich. Where those are not installed:
#     pip install --target .gpu-packages pytest pytest-timeout hypothesis rich
# and take the folder along. The tests run side by side; what is timed runs alone after them.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-check}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}:$PWD/.gpu-packages" PYTHONUNBUFFERED=1
BEGAN=$SECONDS
"$PYTHON" -c "import torch, triton, pytest, pytest_timeout, hypothesis, rich; assert torch.cuda.is_available(), 'no GPU'" || exit 2

# run NAME SECONDS COMMAND...: its output to a log, and its status and time into the table
run() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1 || status=$?
  echo "$status $((SECONDS - start))" > "$OUT/$name.status"
}

tests() { "$PYTHON" -m pytest -q -p no:cacheprovider -o timeout=150 "$@"; }
export -f tests
export PYTHON

run codec 200 bash -c 'tests tests/gpu/test_codec.py' &
run kernels 200 bash -c 'tests tests/gpu/test_triton.py' &
run steps 230 bash -c 'tests tests/gpu/test_cuda.py' &
[ -f tests/gpu/test_users.py ] && run users 200 bash -c 'tests tests/gpu/test_users.py' &
if command -v compute-sanitizer > /dev/null; then
  run memcheck 240 compute-sanitizer --tool memcheck --error-exitcode 77 --target-processes all \
    "$PYTHON" -m pytest -q -p no:cacheprovider -o timeout=230 tests/gpu/test_codec.py \
    -k "cannot_be or longer or remains or 3000-40-2" &
fi
wait
run select 130 "$PYTHON" -m benchmarks.select --numel 1000000 27569568 124439808 536870912 --density 0.03 --dtype float32
run step_lstman4 60 "$PYTHON" -m benchmarks.device_step --model lstman4 --batch 16 --rounds 60

for name in codec kernels steps users memcheck; do
  [ -f "$OUT/$name.log" ] && grep -E "^(FAILED|ERROR)|^E  |ERROR SUMMARY|Invalid __" "$OUT/$name.log" | cut -c1-200 | head -12
done
for name in select step_lstman4; do grep -v '^{' "$OUT/$name.log" | tail -14; done
echo
printf '%-14s %-7s %6s  %s\n' part status s "last line"
for name in codec kernels steps users memcheck select step_lstman4; do
  [ -f "$OUT/$name.status" ] || continue
  read -r status took < "$OUT/$name.status"
  rm "$OUT/$name.status"
  printf '%-14s %-7s %6s  %s\n' "$name" "$status" "$took" "$(grep -v '^{' "$OUT/$name.log" | grep . | tail -1 | cut -c1-90)"
done
echo "in all $((SECONDS - BEGAN)) s"
