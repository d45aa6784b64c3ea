#!/usr/bin/env bash
# Everything that needs a GPU, in one command: correctness, compute-sanitizer, benchmark tables.
#
#     tools/gpu_check.sh [BUILD_DIR [LOG_DIR]]      default: build/sm90, BUILD_DIR/gpu_check
#
# Builds nothing and needs no CMake: the executables may come from another machine, with shared
# libraries they need in BUILD_DIR/lib. Writes one log a step to LOG_DIR, ends with a table of the
# steps, and fails if any of them did; a failed step does not stop the others. docs/testing.md says
# what each step proves.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

build=${1:-build/sm90}
logs=${2:-$build/gpu_check}
mkdir -p "$logs"
if [ -d "$build/lib" ]; then
  LD_LIBRARY_PATH=$(cd "$build/lib" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi

failed=false table=""

# step NAME COMMAND...: runs the command with its output in a log, and counts tests that it skipped.
step() {
  local name=$1 log=$logs/$1.log start=$SECONDS result=passed skipped
  shift
  printf '== %s\n' "$name"
  if ! "$@" > "$log" 2>&1; then
    result=FAILED failed=true
    grep -E '\[  FAILED  \]|Failure|========= (ERROR SUMMARY|Invalid|Race|Uninit)|rror' "$log" \
      | head -n 20
    tail -n 15 "$log"
  elif grep -m 1 'skipped: no CUDA device .*cuda:0' "$log"; then
    result=skipped failed=true
  fi
  skipped=$(sed -nE 's/^\[  SKIPPED \] ([0-9]+) tests?, listed below:.*/, \1 skipped/p' "$log")
  table+=$(printf '%-28s %-8s %5d s%s' "$name" "$result" $((SECONDS - start)) "$skipped")$'\n'
}

# sanitize TOOL TEST ARGUMENT...: a test under one of compute-sanitizer's tools.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
sanitize() {
  timeout 300 "$sanitizer" --tool "$1" --error-exitcode 1 --launch-timeout 0 \
    "$build/tests/bin/$2" "${@:3}"
}

# finds TOOL FAULT: the tool reports a fault that is there.
finds() {
  local code=0
  timeout 300 "$sanitizer" --tool "$1" --error-exitcode 99 --launch-timeout 0 \
    "$build/tests/bin/sanitizer_faults" "$2" || code=$?
  [ $code -eq 99 ] && return
  echo "Failure: $1 does not report the fault $2: exit code $code"
  return 1
}

tests=()
for test in "$build"/tests/bin/*gpu* "$build"/tests/bin/*cuda*; do
  [ -x "$test" ] && tests+=("${test##*/}")
done
if [ ${#tests[@]} -eq 0 ]; then
  echo "no GPU tests in $build/tests/bin: build the target gpu_tests with -DNARROWFLOAT_CUDA=ON" >&2
  exit 2
fi
for test in "${tests[@]}"; do
  step "$test" "$build/tests/bin/$test"
done

# What the clean reports below are worth.
step memcheck_finds_faults finds memcheck out_of_bounds
step racecheck_finds_faults finds racecheck race
step initcheck_finds_faults finds initcheck uninitialized
step synccheck_finds_faults finds synccheck barrier

# Not judged: what racecheck says of correct hand-overs of a stage, and so whether it can be asked
# about the grouped GEMM. docs/kernels/grouped_gemm_sm90.md.
hand_overs() {
  local code fault
  for fault in hand_over_by_lanes hand_over_by_warp; do
    code=0
    timeout 60 "$sanitizer" --tool racecheck --error-exitcode 99 \
      "$build/tests/bin/sanitizer_faults" "$fault" > "$logs/$fault.log" 2>&1 || code=$?
    echo "$fault: racecheck ends with $code (99: hazards)"
  done
}
step racecheck_hand_overs hand_overs
cat "$logs/racecheck_hand_overs.log"

# A small set: every kernel's paths, not every value. initcheck takes the one test whose outputs
# start out unwritten; everywhere else poison hides what it looks for.
export NARROWFLOAT_CONFORMANCE_CASES=0.1
few='GpuQueueing.OutputsNeedNoInitialization'
step memcheck_conformance sanitize memcheck conformance_gpu
tiles='-*ARowIsTheSameInEveryTile*'
step memcheck_grouped_gemm sanitize memcheck grouped_gemm_cuda_test --gtest_filter="$tiles"
moe='*ExactCases*:*Precomputed*:*CodesEvery*:*ReportsIds*:*AByteLess*'
# Moe spec 13.3: configurations A, D and E.
moe+=':*AtEveryCount/small_mxfp4_fp8:*AtEveryCount/odd_nvfp4:*AtEveryCount/deepseek_v3_fp8_block'
step memcheck_moe sanitize memcheck moe_cuda_test --gtest_filter="$moe"
step memcheck_route_permute sanitize memcheck routing_cuda_test \
  --gtest_filter='RoutePermute.Ids*:RoutePermute.Keys*'
step memcheck_queueing sanitize memcheck gpu_test --gtest_filter="$few:GpuQueueing.Graphs*"
step racecheck_conformance sanitize racecheck conformance_gpu
step synccheck_grouped_gemm sanitize synccheck grouped_gemm_cuda_test --gtest_filter="$tiles"
step synccheck_moe sanitize synccheck moe_cuda_test --gtest_filter="$moe"
step racecheck_queueing sanitize racecheck gpu_test --gtest_filter="$few"
step initcheck_queueing sanitize initcheck gpu_test --gtest_filter="$few"
step racecheck_streamed_rows sanitize racecheck quantize_rows_cuda_test \
  --gtest_filter='QuantizeStreamCuda.AFewCases*'
unset NARROWFLOAT_CONFORMANCE_CASES

step benchmarks bench/run_gpu_benchmarks.sh "$logs/bench" --quick --build "$build"

printf '\n%s' "$table"
if $failed; then
  echo "FAILED; logs are in $logs"
  exit 1
fi
echo "all GPU checks passed; logs are in $logs"
