#!/usr/bin/env bash
# Everything that needs a GPU, in one command: correctness, compute-sanitizer, benchmark tables.
#
#     tools/gpu_check.sh [--jobs N] [--no-benchmarks] [--python FOLDER] [--soak LAYERS]
#                        [BUILD_DIR [LOG_DIR]]  default: build/sm90, BUILD_DIR/gpu_check
#
# Builds nothing and needs no CMake: the executables may come from another machine, with shared
# libraries they need in BUILD_DIR/lib. N steps run at a time (default: half of the processors, at
# most 8), since most of their time goes into references on the CPU; the benchmarks, and the tests
# that ask for the GPU's free memory or for much of it, run alone. With --python, a folder that has
# the package with CUDA (a wheel, unpacked), its tests of tensors run as well; with --soak, at least
# so many random layers of all modes (2000 take 15 s on 16 processors). Writes one log a step to
# LOG_DIR, ends with a table of the steps, and fails if any of them did; a failed step does not stop
# the others. docs/testing.md says what each step proves.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

jobs=$(($(nproc) / 2))
((jobs <= 8)) || jobs=8
((jobs >= 1)) || jobs=1
benchmarks=true
python="" soak=0
while [ $# -gt 0 ]; do
  case "$1" in
    --jobs)
      jobs=${2:-}
      if ! [[ $jobs =~ ^[1-9][0-9]*$ ]]; then
        echo "gpu_check: --jobs takes a number from 1 on, got '$jobs'" >&2
        exit 2
      fi
      shift
      ;;
    --no-benchmarks) benchmarks=false ;;
    --python)
      if [ ! -d "${2:-}/narrowfloat" ]; then
        echo "gpu_check: --python takes a folder with the package in it, got '${2:-}'" >&2
        exit 2
      fi
      python=$(cd "$2" && pwd)
      shift
      ;;
    --soak)
      soak=${2:-}
      if ! [[ $soak =~ ^[1-9][0-9]*$ ]]; then
        echo "gpu_check: --soak takes a number of layers from 1 on, got '$soak'" >&2
        exit 2
      fi
      shift
      ;;
    -*)
      sed -n '4,5s/^# \{0,1\}//p' "$0" >&2
      exit 2
      ;;
    *) break ;;
  esac
  shift
done
build=${1:-build/sm90}
logs=${2:-$build/gpu_check}
rm -rf "$logs/results"
mkdir -p "$logs/results"
if [ -d "$build/lib" ]; then
  LD_LIBRARY_PATH=$(cd "$build/lib" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi

num_steps=0

# run_step NUMBER NAME COMMAND...: runs the command with its output in a log, counts tests that it
# skipped, and adds a line to the table.
run_step() {
  local number=$1 name=$2 log=$logs/$2.log start=$SECONDS result=passed skipped
  shift 2
  if ! "$@" > "$log" 2>&1; then
    result=FAILED
    printf '== %s\n' "$name"
    grep -E '\[  FAILED  \]|Failure|========= (ERROR SUMMARY|Invalid|Race|Uninit)|rror' "$log" \
      | head -n 20
    tail -n 15 "$log"
  elif grep -m 1 'skipped: no CUDA device .*cuda:0' "$log"; then
    result=skipped
  fi
  skipped=$(sed -nE 's/^\[  SKIPPED \] ([0-9]+) tests?, listed below:.*/, \1 skipped/p' "$log")
  printf '%-32s %-8s %5d s%s\n' "$name" "$result" $((SECONDS - start)) "$skipped" \
    > "$logs/results/$(printf %03d "$number")"
}

# step NAME COMMAND...: runs beside other steps, as soon as there is a free slot.
step() {
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
  num_steps=$((num_steps + 1))
  run_step $num_steps "$@" &
}

# step_alone NAME COMMAND...
step_alone() {
  wait
  step "$@"
  wait
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
  echo "no GPU tests in $build/tests/bin: build the target gpu_tests with NARROWFLOAT_CUDA=ON" >&2
  exit 2
fi

# The tests that ask for the GPU's free memory, or for much of it.
alone='*AllocatesNothing*:*NothingIsAllocated*:ExpertSourceMemory.*:*LeavesNoMemoryAllocated*'
alone+=':GpuLarge.*:*2To31*:*TwoToThe31*'

# sharded NAME SHARDS COMMAND...: the tests of an executable, split into that many steps.
sharded() {
  local name=$1 shards=$2 shard
  shift 2
  for ((shard = 0; shard < shards; ++shard)); do
    step "$name-$((shard + 1))of$shards" \
      env GTEST_TOTAL_SHARDS="$shards" GTEST_SHARD_INDEX=$shard "$@"
  done
}
for test in "${tests[@]}"; do
  shards=1
  case $test in
    conformance_gpu) shards=8 ;;
    moe_cuda_test) shards=6 ;;
    gpu_test) shards=3 ;;
    grouped_gemm_cuda_test | quantize_rows_cuda_test | routing_cuda_test) shards=2 ;;
  esac
  sharded "$test" $shards "$build/tests/bin/$test" --gtest_filter="-$alone"
done

# A test a mode, of four layers by itself.
if ((soak > 0)); then
  modes=$("$build/tests/bin/moe_cuda_test" --gtest_list_tests --gtest_filter='*MoeSoak*' \
    | grep -c '^  ')
  sharded moe_soak "$modes" env NARROWFLOAT_CONFORMANCE_CASES=$(((soak - 1) / (4 * modes) + 1)) \
    "$build/tests/bin/moe_cuda_test" --gtest_filter='*MoeSoak*'
fi

# These steps show that the tools can find faults, without which the clean reports below mean
# nothing.
step memcheck_finds_faults finds memcheck out_of_bounds
step racecheck_finds_faults finds racecheck race
step initcheck_finds_faults finds initcheck uninitialized
step synccheck_finds_faults finds synccheck barrier

# Not judged: racecheck's findings about correct hand-overs of a pipeline stage, which decide
# whether it can be asked about the grouped GEMM. docs/kernels/grouped_gemm_sm90.md.
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
allreduce='*SmallRows*/nvfp4:*SmallRows*/norm_fp8_token:*SmallRows*/moe_*:*SmallRows*/fp8_group'
allreduce+=':*SmallRows*/mxfp8:*NoTokens*:*OverACluster*'
for tool in memcheck racecheck synccheck; do
  step "${tool}_allreduce" sanitize $tool allreduce_cuda_test --gtest_filter="$allreduce"
done
experts='*TakesAnyType*:*RowsOfAnyWidth*:*SendsTokensToCopies*:*ReplaysOf*:*ARankThat*'
for tool in memcheck racecheck synccheck; do
  step "${tool}_expert_parallel" sanitize $tool expert_parallel_cuda_test --gtest_filter="$experts"
done
step memcheck_queueing sanitize memcheck gpu_test --gtest_filter="$few:GpuQueueing.Graphs*"
step racecheck_conformance sanitize racecheck conformance_gpu
step synccheck_grouped_gemm sanitize synccheck grouped_gemm_cuda_test --gtest_filter="$tiles"
step synccheck_moe sanitize synccheck moe_cuda_test --gtest_filter="$moe"
# The findings of racecheck about the grouped GEMM, whose hand-overs it does not follow, are not
# judged. The launches in clusters are left out, since they would end the tool:
# docs/kernels/grouped_gemm_sm90.md.
racecheck_layers() {
  local layers='*AtEveryCount/small_mxfp4_fp8:*AtEveryCount/odd_nvfp4' code=0
  layers+=':*AtEveryCount/deepseek_v3_mxfp4_fp8:*EveryKAgreesWithTheCpu/fp8_block'
  local report=$logs/racecheck_layers.report
  timeout 300 "$sanitizer" --tool racecheck --error-exitcode 99 --launch-timeout 0 \
    "$build/tests/bin/moe_cuda_test" --gtest_filter="$layers" > "$report" 2>&1 || code=$?
  cat "$report"
  ((code == 0 || code == 99)) || return "$code"
  # The tool's exit code hides that of the tests.
  grep -qF '[  PASSED  ]' "$report" || return 1
  ! grep -qE '\[  FAILED  \]|Sanitizer Error' "$report" || return 1
  ! grep 'Race reported' "$report" | grep -v multiply_groups
}
step racecheck_moe racecheck_layers
# This GEMM fills its stages once, so there are no hand-overs that racecheck does not follow.
step racecheck_grouped_gemm sanitize racecheck grouped_gemm_cuda_test \
  --gtest_filter='*FewAndManyTiles*/mxfp4_fp8:*FewAndManyTiles*/fp8_block'
step racecheck_queueing sanitize racecheck gpu_test --gtest_filter="$few"
step initcheck_queueing sanitize initcheck gpu_test --gtest_filter="$few"
step racecheck_streamed_rows sanitize racecheck quantize_rows_cuda_test \
  --gtest_filter='QuantizeStreamCuda.AFewCases*'
unset NARROWFLOAT_CONFORMANCE_CASES
for test in "${tests[@]}"; do
  selected=$("$build/tests/bin/$test" --gtest_list_tests --gtest_filter="$alone" 2> /dev/null)
  grep -q "^  " <<< "$selected" || continue
  step_alone "${test}_memory" "$build/tests/bin/$test" --gtest_filter="$alone"
done
# The CPU beside the GPU may have matrix tiles, which few machines have.
if grep -q amx_bf16 /proc/cpuinfo; then
  step matrix_tiles "$build/tests/bin/moe_ops_test" --gtest_filter='*GroupedGemm*:*Tile*:*Int8*'
fi
# Without torch, or a GPU that it sees, the tests would skip. The rest of tests/python_package tests
# an installed package and the CPU: ./test.sh.
python_tests() {
  export PYTHONPATH=$python
  python3 -c 'import narrowfloat, torch
assert torch.cuda.is_available() and narrowfloat.build_info()["cuda_enabled"]' || return
  python3 -m pytest -q -p no:cacheprovider \
    tests/python_package/test_{cuda,two_gpus,memory,wheel}.py \
    tests/python_package/test_{flashinfer,torch,transformers}*.py
}
python_note="not run: the Python package's tests; --python FOLDER"
if [ -n "$python" ]; then
  step_alone python_package python_tests
  python_note=$(tail -n 1 "$logs/python_package.log")
fi
: > "$logs/benchmarks.log"
! $benchmarks \
  || step_alone benchmarks bench/run_gpu_benchmarks.sh "$logs/bench" --quick --build "$build"

cat "$logs/racecheck_hand_overs.log" "$logs/benchmarks.log"
printf '\n'
cat "$logs/results/"*
echo "$python_note"
# A step that was killed has no line.
if (($(cat "$logs/results/"* | wc -l) != num_steps)) \
  || grep -qE '^[^ ]+ +(FAILED|skipped) ' "$logs/results/"*; then
  echo "FAILED; logs are in $logs"
  exit 1
fi
echo "all GPU checks passed; logs are in $logs"
