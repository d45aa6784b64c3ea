#!/usr/bin/env bash
# All checks of the repository, in the order that finds mistakes soonest; stops at the first stage
# that fails. Installs what is missing first (tools/setup.sh --tests). Safe to run again. CI runs
# this and nothing else. docs/testing.md says what each stage covers and how to run a part of it.
set -euo pipefail
cd "$(dirname "$0")"

jobs=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=$jobs
if command -v ccache > /dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi

stage="" stage_start=0 timings=""

# stage NAME COMMAND...: runs the command as a named and timed stage.
stage() {
  stage=$1
  stage_start=$SECONDS
  printf '\n== %s\n' "$stage"
  shift
  "$@"
  timings+=$(printf '%6d s  %s' $((SECONDS - stage_start)) "$stage")$'\n'
}

report() {
  local status=$?
  printf '\n== Timing\n%s' "$timings"
  if [ $status -eq 0 ]; then
    printf '%6d s  in all\nall checks passed\n' $SECONDS
  else
    printf '%6d s  %s\nFAILED in stage: %s\n' $((SECONDS - stage_start)) "$stage" "$stage"
  fi
}
trap report EXIT

build() {
  cmake --preset "$1" --log-level=WARNING
  cmake --build --preset "$1" "${@:2}"
}

python_tests() {
  NARROWFLOAT_TEST_BIN=$PWD/build/cpu/tests/bin NARROWFLOAT_CLI=$PWD/build/cpu/src/cli/narrowfloat \
    .venv/bin/python -m pytest -q -p no:cacheprovider tests/python tests/cli
}

sanitized_unit_tests() {
  build cpu-asan --target unit_tests
  ctest --preset cpu-asan -L '^unit$' -j "$jobs" --no-tests=error
}

cuda_compile_check() {
  if command -v nvcc > /dev/null; then
    build sm90 --target cuda_headers_compile
  else
    echo "skipped: no nvcc on PATH"
  fi
}

stage "setup" tools/setup.sh --tests
stage "build (preset cpu)" build cpu
stage "ctest (preset cpu)" ctest --preset cpu -j "$jobs" --no-tests=error
stage "Python tests" python_tests
stage "lint (preset lint)" build lint
stage "unit tests with sanitizers (preset cpu-asan)" sanitized_unit_tests
stage "CUDA compile check (preset sm90)" cuda_compile_check
