#!/usr/bin/env bash
# Tests that take hours, in parts (docs/testing.md says what was run, when, and how much of it):
#
#     tools/long_tests.sh                      everything, with the counts of the table below
#     tools/long_tests.sh --only index         one part; may be repeated
#     tools/long_tests.sh --executions 1000000 another count for the fuzz targets
#     tools/long_tests.sh --blocks N --values N   other counts for quantize and dequantize
#     tools/long_tests.sh --jobs 2             processes or threads at a time (default: all cores)
#     tools/long_tests.sh --seed 2             other random inputs (default 1)
#
#   part           what                                                                 count
#   header         libFuzzer: headers of safetensors files                         10^8 inputs
#   index          libFuzzer: model.safetensors.index.json                         10^8 inputs
#   config         libFuzzer: config.json                                          10^8 inputs
#   command_line   libFuzzer: arguments of narrowfloat                             10^6 inputs
#   api            libFuzzer: shapes and options of the C++ API                    10^7 inputs
#   floats         conversions of every fp32 number against their definitions       all 2^32
#   quantize       every implementation against cpu_reference: random blocks of 16 or 32
#                  elements, and values of the other formats               10^9 blocks, 10^10 values
#   dequantize     the same from codes                                     10^9 blocks, 10^10 values
#
# Each part prints lines `long_tests: PART: ...`, which build/long/results.txt keeps; fuzz targets
# after each 10^7 inputs. A fuzz target that was stopped starts from the inputs that it had found
# (build/long/corpus): give it another seed and --executions for the rest. Fuzz targets are built
# with clang 14, AddressSanitizer and UBSan (preset fuzz), the rest with the preset check.
set -euo pipefail
cd "$(dirname "$0")/.."

all_parts=(header index config command_line api floats quantize dequantize)
parts=() jobs=$(nproc) executions= blocks=1000000000 values=10000000000 seed=1

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
  exit "${1:-2}"
}
if [ "${1:-}" = --help ]; then usage 0; fi
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --only) parts+=("$2") ;;
    --executions) executions=$2 ;;
    --blocks) blocks=$2 ;;
    --values) values=$2 ;;
    --jobs) jobs=$2 ;;
    --seed) seed=$2 ;;
    *) usage ;;
  esac
  shift 2
done
[ "${#parts[@]}" -gt 0 ] || parts=("${all_parts[@]}")
for part in "${parts[@]}"; do
  [[ " ${all_parts[*]} " == *" $part "* ]] || usage
done

has_part() { [[ " ${parts[*]} " == *" $1 "* ]]; }

tools/setup.sh --long
export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
work=build/long
mkdir -p $work/logs

# build PRESET TARGET...
build() {
  cmake --preset "$1" --log-level=WARNING
  cmake --build --preset "$1" -j "$jobs" --target "${@:2}"
}

# report PART TEXT
report() {
  echo "long_tests: $1: $2 ($(date -u +%F), $(git rev-parse --short HEAD))" |
    tee -a $work/results.txt
}

# The greatest length of an input, and the number of inputs.
declare -A max_len=([header]=128 [index]=96 [config]=160 [command_line]=120 [api]=96)
declare -A counts=([header]=100000000 [index]=100000000 [config]=100000000
  [command_line]=1000000 [api]=10000000)

# fuzz TARGET: runs the inputs in rounds of up to 10^7 for each of `jobs` processes, which share the
# corpus that they find, and reports after each round. Then replays what was found, and judges
# leaks: looking for them after each input costs a fifth of the speed.
fuzz() {
  local target=$1 count=${executions:-${counts[$1]}} corpus=$work/corpus/$1 start=$SECONDS
  local program=build/fuzz/tests/fuzz/fuzz_$target kept=tests/fuzz/corpus/$target
  local dictionary=tests/fuzz/dictionaries/$target.dict
  mkdir -p "$corpus"
  local options=(-max_len="${max_len[$target]}" -rss_limit_mb=512 -timeout=5 -use_cmp=0
    -use_counters=0 -reduce_inputs=0 -entropic=0 -close_fd_mask=3
    -artifact_prefix="$work/$target-")
  if [ -f "$dictionary" ]; then options+=(-dict="$dictionary"); fi
  export ASAN_OPTIONS=malloc_context_size=0:quarantine_size_mb=1:max_malloc_fill_size=0
  local done=0 round=0 job pids runs ran failed=false
  while [ "$done" -lt "$count" ] && ! $failed; do
    round=$((round + 1)) pids=() runs=$(((count - done + jobs - 1) / jobs))
    if [ $runs -gt 10000000 ]; then runs=10000000; fi
    for ((job = 0; job < jobs; ++job)); do
      "$program" "$corpus" "$kept" "${options[@]}" -runs=$runs -detect_leaks=0 -reload=60 \
        -seed=$((seed * 1000000 + round * 1000 + job)) > "$work/logs/$target.$job" 2>&1 &
      pids+=($!)
    done
    for job in "${!pids[@]}"; do
      wait "${pids[job]}" || { failed=true; tail -n 40 "$work/logs/$target.$job"; }
      ran=$(sed -n 's/^Done \([0-9]*\) runs.*/\1/p' "$work/logs/$target.$job")
      done=$((done + ${ran:-0}))
    done
    $failed || report "$target" "$done of $count executions, $((SECONDS - start)) s, seed $seed"
  done
  unset ASAN_OPTIONS
  "$program" "$corpus" "$kept" "${options[@]}" -runs=0 > "$work/logs/$target.replay" 2>&1 ||
    { failed=true; tail -n 40 "$work/logs/$target.replay"; }
  if $failed; then
    report "$target" "FAILED; the input is $work/$target-*"
    return 1
  fi
  report "$target" "0 crashes, 0 leaks, 0 timeouts"
}

# Every magnitude with both signs is all 2^32 numbers. The grid of E2M1 has no sign, and ends at 7.
floats() {
  local start=$SECONDS
  local tests=(MiniFloatCodec/E2M1.EncodesSampledFloatsOfBothSignsToTheNearestCode
    MiniFloatCodec/E4M3.EncodesSampledFloatsOfBothSignsToTheNearestCode
    MiniFloatCodec/E5M2.EncodesSampledFloatsOfBothSignsToTheNearestCode
    Types/Float16.NarrowsSampledFloatsOfBothSigns/Bf16
    Types/Float16.NarrowsSampledFloatsOfBothSigns/Fp16
    Ue8m0.EncodesUpSampledFloatsWithTheSignIgnored
    Ue8m0.FloorAndEvenFollowTheirDefinitionsOnSampledMaxima
    RoundToE2m1Grid.IsTheNumberOfTheCode)
  if ! printf '%s\n' "${tests[@]}" |
    NARROWFLOAT_EXHAUSTIVE=1 xargs -P "$jobs" -I{} sh -c '
      output=$(build/check/tests/bin/formats_test --gtest_brief=1 --gtest_filter={}) &&
        echo "$output" | grep -q "PASSED  \] 1 test" || { echo "{}: $output"; exit 255; }'; then
    report floats "FAILED"
    return 1
  fi
  report floats \
    "${#tests[@]} conversions of all 2^32 fp32 numbers, 0 mismatches in $((SECONDS - start)) s"
}

random_blocks() {
  local part=$1 start=$SECONDS options=()
  [ "$part" = quantize ] || options=(--dequantize)
  if ! build/check/tests/bin/random_blocks --blocks "$blocks" --values "$values" --jobs "$jobs" \
    --seed "$seed" "${options[@]}" > $work/logs/"$part" 2>&1; then
    tail -n 5 $work/logs/"$part"
    report "$part" "FAILED"
    return 1
  fi
  while read -r line; do report "$part" "$line"; done < $work/logs/"$part"
  report "$part" "in $((SECONDS - start)) s"
}

fuzzers=()
for part in header index config command_line api; do
  if has_part $part; then fuzzers+=("fuzz_$part"); fi
done
[ "${#fuzzers[@]}" -eq 0 ] || build fuzz "${fuzzers[@]}"
programs=()
if has_part floats; then programs+=(formats_test); fi
if has_part quantize || has_part dequantize; then programs+=(random_blocks); fi
[ "${#programs[@]}" -eq 0 ] || build check "${programs[@]}"

failures=0
for part in "${parts[@]}"; do
  case $part in
    floats) floats || failures=$((failures + 1)) ;;
    quantize | dequantize) random_blocks "$part" || failures=$((failures + 1)) ;;
    *) fuzz "$part" || failures=$((failures + 1)) ;;
  esac
done
exit $((failures > 0))
