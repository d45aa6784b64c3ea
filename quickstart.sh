#!/usr/bin/env bash
# From a fresh clone to a quantized model: installs what is missing (Debian packages), builds the
# programs `narrowfloat` and `narrowfloat-bench`, quantizes the small model of this repository to
# NVFP4 and MXFP4, and shows what that saved and cost, down to the accuracy of the model. Everything
# it makes is under build/quickstart/; safe to run again.
set -euo pipefail
cd "$(dirname "$0")"

model=models/tiny-moe
build=build/quickstart
narrowfloat=$build/src/cli/narrowfloat
narrowfloat_bench=$build/src/bench_cli/narrowfloat-bench
out=$build/models

say() { printf '\n== %s\n' "$*"; }

# Prints a command, then runs it.
show() {
  printf '$ %s\n' "$*"
  "$@"
}

say "1. What the build needs (tools/setup.sh)"
tools/setup.sh
echo "everything is there"

say "2. Build the programs (CMake preset cpu as a unity build, without tests)"
if command -v ccache > /dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
# A folder of its own: build/cpu keeps its options.
show cmake --preset cpu -B $build -DCMAKE_UNITY_BUILD=ON -DNARROWFLOAT_TESTS=OFF \
  -DNARROWFLOAT_BENCH=ON --log-level=WARNING
show cmake --build $build --target narrowfloat_cli narrowfloat_bench_cli

mkdir -p $out
step=3
for format in nvfp4 mxfp4; do
  say "$step. Quantize $model to $format"
  show $narrowfloat quantize $model "$out/tiny-moe-$format" --to $format --force \
    | tee "$out/$format.summary.txt"
  step=$((step + 1))
done

say "5. What is in the NVFP4 model (first lines)"
show $narrowfloat inspect $out/tiny-moe-nvfp4 > $out/inspect.txt
head -n 20 $out/inspect.txt

say "6. NVFP4 compared with the original, tensor by tensor (first and last lines)"
# Exit code 1 means "different", as it must be here.
show $narrowfloat diff $model $out/tiny-moe-nvfp4 > $out/diff.txt || [ $? -eq 1 ]
head -n 10 $out/diff.txt
echo "..."
tail -n 3 $out/diff.txt

say "7. Bits per byte of a held-out text, experts in bf16 and in the two formats (seconds)"
eval=(eval "$model" --mode nvfp4_bf16 --mode mxfp4_bf16)  # Without modes: all of them.
echo "\$ $narrowfloat_bench ${eval[*]}"
$narrowfloat_bench "${eval[@]}" > $out/eval.txt
echo "done, shown at the end"

say "Result: size and accuracy"
for format in nvfp4 mxfp4; do
  echo
  tail -n +2 "$out/$format.summary.txt"  # Without the line of the command.
done
printf '\nThe quantized models: %s, the programs: %s, %s\n\n' \
  "$out/tiny-moe-{nvfp4,mxfp4}" "$narrowfloat" "$narrowfloat_bench"
cat $out/eval.txt
