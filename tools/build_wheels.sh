#!/usr/bin/env bash
# Builds a wheel that installs on any Linux with glibc 2.34, and tries it where no compiler is:
#
#     tools/build_wheels.sh [PYTHON]   default: .venv/bin/python, which tools/setup.sh --tests makes
#
# The wheel, for the CPU, goes to build/wheels. auditwheel must find nothing that ties it to a newer
# system, and it must stay below 64 MB. Then it is installed into a fresh environment, where the
# programs of PATH are those of the environment alone, and quantizes models/tiny-moe from there.
# Needs the network, for auditwheel and NumPy.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-.venv/bin/python}
platform=manylinux_2_34_x86_64
most_bytes=64000000
out=$PWD/build/wheels
rm -rf "$out"
mkdir -p "$out/plain"

"$python" -m venv "$out/tools"
"$out/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel wheel

# This Python may have the build backend already; else pip fetches it.
isolation=()
if "$python" -c 'import nanobind, scikit_build_core' 2> /dev/null; then
  isolation=(--no-build-isolation)
fi
"$python" -m pip wheel --quiet --disable-pip-version-check "${isolation[@]}" --no-deps \
  --config-settings=build-dir=build/python --config-settings=cmake.define.NARROWFLOAT_CUDA=OFF \
  --wheel-dir "$out/plain" .

plain=$(ls "$out"/plain/narrowfloat-*.whl)
if ! "$out/tools/bin/auditwheel" show "$plain" | tr '\n' ' ' | grep -q "\"$platform\""; then
  "$out/tools/bin/auditwheel" show "$plain" >&2
  echo "build_wheels: $plain does not fit $platform" >&2
  exit 1
fi
"$out/tools/bin/wheel" tags --platform-tag "$platform" "$plain" > /dev/null
mv "$out"/plain/*"$platform".whl "$out"
wheel=$(ls "$out"/narrowfloat-*.whl)
bytes=$(stat -c %s "$wheel")
if [ "$bytes" -ge $most_bytes ]; then
  echo "build_wheels: $wheel has $bytes bytes, expected less than $most_bytes" >&2
  exit 1
fi

# The environment's own programs, and no library that the build used.
"$python" -m venv "$out/fresh"
"$out/fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
clean() {
  env -i HOME="$out" PATH="$out/fresh/bin" "$@"
}
if clean "$out/fresh/bin/python" -c 'import shutil, sys
sys.exit(any(map(shutil.which, ("cc", "c++", "gcc", "g++", "cmake", "nvcc"))))'; then
  clean narrowfloat quantize models/tiny-moe "$out/tiny-moe-nvfp4" --to nvfp4
  clean narrowfloat check "$out/tiny-moe-nvfp4"
  clean python -c 'import numpy, narrowfloat
whole = narrowfloat.quantize(numpy.ones((4, 64), numpy.float32), "nvfp4")
assert (narrowfloat.dequantize(whole) == 1).all()'
else
  echo "build_wheels: a compiler is on the PATH of the fresh environment" >&2
  exit 1
fi
echo "$wheel: $bytes bytes, installed and run"
