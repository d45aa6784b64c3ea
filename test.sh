#!/usr/bin/env bash
# All checks of the repository, in the order that finds mistakes soonest; stops at the first stage
# that fails. Installs what is missing first (tools/setup.sh --tests). Safe to run again. CI runs
# this and nothing else. docs/testing.md says what each stage covers and how to run a part of it.
#
#     ./test.sh                 what needs PyTorch only if an earlier run made .venv-torch
#     ./test.sh --with-torch    installs PyTorch (several GB) into .venv-torch
#     ./test.sh --with-engines  installs vLLM and SGLang (9 GB) into .venv-engines, for our plug-ins
#     ./test.sh --with-packages makes the Debian package and tries it in a chroot
set -euo pipefail
cd "$(dirname "$0")"

with_torch=false with_engines=false with_packages=false
for option in "$@"; do
  case "$option" in
    --with-torch) with_torch=true ;;
    --with-engines) with_engines=true ;;
    --with-packages) with_packages=true ;;
    *)
      echo "usage: ./test.sh [--with-torch] [--with-engines] [--with-packages]" >&2
      exit 2
      ;;
  esac
done

jobs=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL=$jobs

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

has_nvcc=OFF
if command -v nvcc > /dev/null; then has_nvcc=ON; fi

# build PRESET TARGET...: no target stands for all of them.
build() {
  cmake --preset "$1" --log-level=WARNING
  cmake --build --preset "$1" ${2:+--target "${@:2}"}
}

# Builds what all stages but lint, sanitizers and the emulator test: library, programs, tests, and
# the CUDA part where nvcc is.
build_everything() {
  cmake --preset check -DNARROWFLOAT_CUDA=$has_nvcc --log-level=WARNING
  cmake --build --preset check
}

# A file's tests stay in one process, which makes what they share once. (Those of the Python package
# all do: one of them compares a table with what the others called.)
python_tests() {
  NARROWFLOAT_TEST_BIN=$PWD/build/check/tests/bin \
    NARROWFLOAT_CLI=$PWD/build/check/src/cli/narrowfloat \
    NARROWFLOAT_BENCH_CLI=$PWD/build/check/src/bench_cli/narrowfloat-bench \
    .venv/bin/python -m pytest -q -p no:cacheprovider -n "$jobs" --dist loadfile \
    tests/python tests/cli
}

# The wheel as `pip install .` makes it, without a network, and its tests, in .venv; warnings are
# errors. The CUDA part is left out: the preset check compiles it, and so the library and the
# programs are also built and tested without it.
python_package_tests() {
  rm -rf build/wheel
  .venv/bin/pip wheel --quiet --disable-pip-version-check --no-build-isolation \
    --no-deps --config-settings=build-dir=build/python \
    --config-settings=cmake.define.NARROWFLOAT_CUDA=OFF \
    --config-settings=cmake.define.NARROWFLOAT_WERROR=ON --wheel-dir build/wheel .
  .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    build/wheel/narrowfloat-*.whl
  NARROWFLOAT_EXPECT_WHEEL=1 NARROWFLOAT_TEST_BIN=$PWD/build/check/tests/bin \
    .venv/bin/python -m pytest -q -p no:cacheprovider tests/python_package
}

torch_tests() {
  if ! $with_torch && [ ! -x .venv-torch/bin/python ]; then
    cat << 'TEXT'
skipped, as .venv-torch is not there (./test.sh --with-torch makes it):
  compressed-tensors reading our checkpoints
  narrowfloat.torch: operators, opcheck, torch.compile, modules, memory, process groups
  narrowfloat.transformers: random models of six families, quantized checkpoints of tiny-moe
  quantizers and MoE layers against references written with torch
  tensors of torch in the package's functions and in those with FlashInfer's names
  examples/python/torch_compile.py, tensor_parallel_layer.py, expert_parallel.py, chat_with_moe.py
TEXT
    return
  fi
  tools/setup.sh --torch
  .venv-torch/bin/python -c 'import compressed_tensors, torch'  # pytest would skip without them.
  NARROWFLOAT_CLI=$PWD/build/check/src/cli/narrowfloat \
    .venv-torch/bin/python -m pytest -q -p no:cacheprovider tests/python/test_compressed_tensors.py
  .venv-torch/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    build/wheel/narrowfloat-*.whl
  NARROWFLOAT_EXPECT_WHEEL=1 NARROWFLOAT_TEST_BIN=$PWD/build/check/tests/bin \
    .venv-torch/bin/python -m pytest -q -p no:cacheprovider tests/python_package
}

engine_tests() {
  if ! $with_engines; then
    echo "skipped: plug-ins with the classes of vLLM and SGLang (./test.sh --with-engines)"
    return
  fi
  tools/setup.sh --engines
  .venv-engines/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
    build/wheel/narrowfloat-*.whl
  .venv-engines/bin/python -c 'import sglang, vllm'  # pytest would skip without them.
  # One process each: both engines keep their state in their modules.
  local engine
  for engine in vllm sglang; do
    .venv-engines/bin/python -m pytest -q -p no:cacheprovider tests/python_package/test_$engine.py
  done
}

package_tests() {
  if ! $with_packages; then
    echo "skipped: the Debian package in a chroot (./test.sh --with-packages)"
    return
  fi
  tools/test_package.sh
}

sanitized_unit_tests() {
  build cpu-asan unit_tests
  ctest --preset cpu-asan -L '^unit$' -j "$jobs" --no-tests=error
}

# some_tests PROGRAM FILTER: fails where a test does, and where none of the filter ran.
some_tests() {
  local output
  output=$("$1" --gtest_brief=1 --gtest_filter="$2") || { echo "$output"; return 1; }
  echo "$output"
  grep -q 'PASSED  \] [1-9]' <<< "$output"
}

# oneTBB is not instrumented, so only what each caller computes by itself can be judged.
thread_sanitized_runs() {
  build cpu-tsan moe_threads_test allreduce_test
  some_tests build/cpu-tsan/tests/bin/moe_threads_test '*WithoutThePool*'
  some_tests build/cpu-tsan/tests/bin/allreduce_test 'AllReduceProtocol.*'
}

# Kernels as C++, threads in a random order that repeats. Not all tests: many take minutes here.
emulated_kernels() {
  if [ ! -f "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime.h" ]; then
    echo "skipped: no cuda_runtime.h"
    return
  fi
  build emulated emulated_tests
  # Seed of the order, major compute capability, program, filter.
  export -f some_tests
  xargs -P "$jobs" -L 1 bash -c \
    'export NARROWFLOAT_EMULATOR_SEED=$0 NARROWFLOAT_EMULATED_MAJOR=$1
     some_tests build/emulated/tests/bin/"$2" "$3"' << 'RUNS'
2 9 conformance_gpu *ActivationConformance*
1 9 grouped_gemm_cuda_test *GroupedGemmPortable*_fp8*:*GroupedGemmPortable*/mxfp8
1 9 moe_chain_cuda_test *
1 8 grouped_gemm_cuda_test *EncodingsPortable*Decode*/mxfp4_bf16
2 8 grouped_gemm_cuda_test *HasTheBitsOfTheActivation*/mxfp4_bf16
1 9 grouped_gemm_cuda_test GroupedGemmTilesCuda.TmaTiles*:WeightScalesCuda.*
1 9 grouped_gemm_cuda_test *IsExactForIntegers/fp8_block
1 9 grouped_gemm_cuda_test *IsExactForIntegers/mxfp4_fp8:*IsExactForIntegers/mxfp4_fp8_token
1 9 grouped_gemm_cuda_test *IsExactForIntegers/mxfp4_bf16
1 9 grouped_gemm_cuda_test *IsExactForIntegers/nvfp4_bf16
1 9 allreduce_cuda_test *SmallRows*:*NoTokens*:*IndexOutOfRange*:*OverACluster*
3 9 expert_parallel_cuda_test -*TakesAnyNumber*
2 9 conformance_gpu *QuantizeActivationsConformance*
0 8 conformance_gpu *ShuffleConformance*
0 9 emulator_test *
RUNS
}

# Without a GPU the tests skip; tools/gpu_check.sh is for machines that have one.
gpu_tests() {
  if [ $has_nvcc = OFF ]; then
    echo "skipped: no nvcc on PATH"
    return
  fi
  local test
  for test in build/check/tests/bin/*{gpu,cuda}*; do
    "$test" --gtest_brief=1 | tail -n 3
  done
  .venv/bin/python tools/kernel_resources.py build/check/src/libnarrowfloat.a \
    --check docs/kernels/resources.md
}

stage "setup" tools/setup.sh --tests
if command -v ccache > /dev/null; then
  # So the wheel reuses objects of the preset check: paths are relative to here, and pip would call
  # the same compiler by another name.
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CC=${CC:-cc} CXX=${CXX:-c++}
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
stage "build (preset check)" build_everything
stage "C++ tests" ctest --preset check -LE '^gpu$' -j "$jobs" --no-tests=error
stage "GPU tests" gpu_tests
stage "Python tests" python_tests
stage "Python package" python_package_tests
stage "Python tests with PyTorch" torch_tests
stage "plug-ins of inference engines" engine_tests
stage "Debian package" package_tests
stage "lint (preset lint)" build lint
stage "unit tests with sanitizers (preset cpu-asan)" sanitized_unit_tests
stage "concurrent runs with ThreadSanitizer (preset cpu-tsan)" thread_sanitized_runs
stage "kernels on the CPU (preset emulated)" emulated_kernels
