#!/usr/bin/env bash
# Builds a source distribution and from it wheels that install on any Linux with glibc 2.34, and
# tries them where no compiler is:
#
#     tools/build_wheels.sh [--cuda[=LIST]] [PYTHON...]   default: .venv/bin/python, which
#                                                         tools/setup.sh --tests makes, and the
#                                                         newer ones on PATH
#
# They go to build/wheels; with --cuda, which needs nvcc 13, to build/wheels-cuda. LIST is that of
# CMAKE_CUDA_ARCHITECTURES (docs/howto/use_a_gpu.md), with commas; by default the wheels have code
# for all GPUs. Python 3.11 has a wheel of its own; those from 3.12 on share one of the stable
# interface, which the first of them makes and all of them try.
#
# A wheel is built in an environment of pip's own, which fetches what pyproject.toml requires.
# auditwheel must find nothing that ties it to a newer system, and it must stay below 64 MB. Then it
# is installed into a fresh environment, where the programs of PATH are those of the environment
# alone, and quantizes models/tiny-moe and runs a MoE layer (with --cuda also on a GPU, if one is
# there). Needs the network.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=manylinux_2_34_x86_64
most_bytes=64000000
cuda=OFF out=$PWD/build/wheels architectures=
case "${1:-}" in
  --cuda) cuda=ON architectures=80-real,86-real,89-real,90a-real,100-real,120-real,80-virtual ;;
  --cuda=*) cuda=ON architectures=${1#--cuda=} ;;
esac
if [ $cuda = ON ]; then
  out=$PWD/build/wheels-cuda
  shift
fi
pythons=("$@")
if [ $# -eq 0 ]; then
  pythons=(.venv/bin/python)
  for newer in python3.12 python3.13 python3.14; do
    if "$newer" -c 'import venv' 2> /dev/null; then pythons+=("$newer"); fi
  done
  if [ ${#pythons[@]} -eq 1 ]; then
    echo "build_wheels: no Python 3.12 or later on PATH, so no wheel of the stable interface"
  fi
fi

rm -rf "$out"
mkdir -p "$out/source"
"${pythons[0]}" -m venv "$out/tools"
"$out/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel build wheel
"$out/tools/bin/python" -m build --sdist --outdir "$out" . > /dev/null
tar -xf "$out"/narrowfloat-*.tar.gz -C "$out/source" --strip-components=1

# build_wheel PYTHON: prints the path of the wheel. The paths that ccache sees are those of a build
# in the root of the repository.
build_wheel() {
  local plain version
  version=$("$1" -c 'import sys; print(*sys.version_info[:2], sep=".")')
  rm -rf "$out/plain"
  (cd "$out/source" && CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CC=${CC:-cc} CXX=${CXX:-c++} \
    "$1" -m pip wheel --quiet --disable-pip-version-check --no-deps \
    --config-settings=build-dir="build/python$version" \
    --config-settings=cmake.define.NARROWFLOAT_CUDA=$cuda \
    --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES="${architectures//,/;}" \
    --config-settings=cmake.define.NARROWFLOAT_WERROR=ON --wheel-dir "$out/plain" . >&2) ||
    return 1
  plain=$(ls "$out"/plain/narrowfloat-*.whl)
  if ! "$out/tools/bin/auditwheel" show "$plain" | tr '\n' ' ' | grep -q "\"$platform\""; then
    "$out/tools/bin/auditwheel" show "$plain" >&2
    echo "build_wheels: $plain does not fit $platform" >&2
    return 1
  fi
  "$out/tools/bin/wheel" tags --platform-tag "$platform" "$plain" > /dev/null || return 1
  mv "$out"/plain/*"$platform".whl "$out"
  plain=${plain##*/}
  echo "$out/${plain/linux_x86_64/$platform}"
}

# try_wheel PYTHON WHEEL: the environment's own programs, and no library that the build used.
try_wheel() {
  local fresh=$out/fresh
  rm -rf "$fresh" "$out/tiny-moe-nvfp4"
  "$1" -m venv "$fresh"
  "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$2"
  clean() {
    env -i HOME="$out" PATH="$fresh/bin" "$@"
  }
  if ! clean python -c 'import shutil, sys
sys.exit(any(map(shutil.which, ("cc", "c++", "gcc", "g++", "cmake", "nvcc"))))'; then
    echo "build_wheels: a compiler is on the PATH of the fresh environment" >&2
    return 1
  fi
  clean narrowfloat quantize models/tiny-moe "$out/tiny-moe-nvfp4" --to nvfp4
  clean narrowfloat check "$out/tiny-moe-nvfp4"
  clean python -c 'import numpy, narrowfloat
whole = narrowfloat.quantize(numpy.ones((4, 64), numpy.float32), "nvfp4")
assert (narrowfloat.dequantize(whole) == 1).all()'
  local device devices=(cpu)
  if [ $cuda = ON ] && [ -e /dev/nvidiactl ]; then
    devices+=(cuda)
  fi
  for device in "${devices[@]}"; do
    clean narrowfloat-bench moe run models/tiny-moe --layer 0 --mode nvfp4_bf16 \
      --min-time 0.01 --device "$device" --quiet
  done
}

for python in "${pythons[@]}"; do
  python=$(realpath --no-symlinks "$(command -v "$python")")
  wheel=$(ls "$out"/narrowfloat-*-abi3-*.whl 2> /dev/null || true)
  if [ -z "$wheel" ] || "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
    wheel=$(build_wheel "$python")
  fi
  bytes=$(stat -c %s "$wheel")
  if [ "$bytes" -ge $most_bytes ]; then
    echo "build_wheels: $wheel has $bytes bytes, expected less than $most_bytes" >&2
    exit 1
  fi
  try_wheel "$python" "$wheel"
  echo "$wheel: $bytes bytes, installed and run by $("$python" --version)"
done
