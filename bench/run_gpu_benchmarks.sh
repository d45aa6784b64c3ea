#!/usr/bin/env bash
# Measures this library on the GPU of this machine, and peers beside it, into OUT_DIR/*.json; then
# prints the tables with targets. docs/benchmarks.md has the method.
#
#     bench/run_gpu_benchmarks.sh OUT_DIR [--quick] [--no-peers] [--build DIR] [--device cuda:N]
#
# --quick measures the cases with targets only (about 20 s without peers). Peers need a python3 with
# torch and triton ($PYTHON names another); they are left out where it has none. COMMIT, where it is
# set, is what the documents say was measured. The exit code is not 0 where a result was wrong.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
out="" quick=false peers=true build="" device=cuda:0
usage() {
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=true ;;
    --no-peers) peers=false ;;
    --build | --device)
      [ $# -ge 2 ] || usage
      if [ "$1" = --build ]; then build=$2; else device=$2; fi
      shift
      ;;
    -*) usage ;;
    *)
      [ -z "$out" ] || usage
      out=$1
      ;;
  esac
  shift
done
[ -n "$out" ] || usage

cli=${build:-$root/build/sm90}/src/cli/narrowfloat
if [ ! -x "$cli" ]; then
  echo "run_gpu_benchmarks: $cli does not exist: build it with" >&2
  echo "  cmake --preset sm90 && cmake --build --preset sm90 --target narrowfloat_cli" >&2
  exit 2
fi
python=${PYTHON:-python3}
commit=${COMMIT:-$(git -C "$root" describe --always --dirty 2> /dev/null || echo unknown)}
mkdir -p "$out"
status=0

# sweep NAME ARGUMENT...: one document.
sweep() {
  local name=$1 start=$SECONDS code=0
  shift
  "$cli" bench "$@" --device "$device" --commit "$commit" --json > "$out/$name.json" || code=$?
  [ $code -eq 0 ] || status=1
  # A device that failed, or options that do not fit this version, leave no document behind.
  [ -s "$out/$name.json" ] || rm -f "$out/$name.json"
  printf '%4d s  %s (exit code %d)\n' $((SECONDS - start)) "$name" "$code" >&2
}

rows=1,16,128,1024,4096,16384

# Everything that has a target.
targets() {
  local both=(--layout linear --layout swizzled_128x4)
  sweep target_activation activation --tokens 1,32,256,1024,4096,16384
  sweep target_nvfp4 quantize --format nvfp4 "${both[@]}" --rows $rows --cols 7168
  sweep target_nvfp4_per_token quantize --format nvfp4_per_token --layout linear \
    --rows 1,128,1024,16384 --cols 7168
  sweep target_mxfp4 quantize --format mxfp4 --layout linear --rows 16384 --cols 7168
  sweep target_mxfp8 quantize --format mxfp8 "${both[@]}" --rows 1,128,1024,16384 --cols 7168
  sweep target_fp8_1x128 quantize --format fp8_1x128 --rows 1,1024,16384 --cols 7168
}

full() {
  local fast=(--replays 7 --replay-ms 2) one=(--rows 1024,16384 --cols 7168)
  sweep quantize quantize --layout all --rows $rows --cols 7168 "${fast[@]}"
  sweep quantize_fp16 quantize --dtype fp16 --layout linear --layout swizzled_128x4 \
    --layout mn_major --rows $rows --cols 7168 "${fast[@]}"
  sweep quantize_fast quantize --math fast --rows $rows --cols 7168 "${fast[@]}"
  sweep quantize_amax quantize --encode-scale amax --rows $rows --cols 7168 "${fast[@]}"
  sweep quantize_four_over_six quantize --four-over-six --layout linear \
    --layout swizzled_128x4 --rows $rows --cols 7168 "${fast[@]}"
  sweep quantize_other_cols quantize --layout linear --layout swizzled_128x4 --layout mn_major \
    --rows $rows --cols 1536,2048,2880,4096,16384 "${fast[@]}"
  sweep fused quantize --source silu_mul --source smooth --source rmsnorm --source add_rmsnorm \
    --layout linear --layout swizzled_128x4 --layout mn_major --rows 1,128,1024,16384 --cols 7168 \
    "${fast[@]}"
  sweep dequantize dequantize --layout all --rows $rows --cols 7168 "${fast[@]}"
  sweep dequantize_fp16 dequantize --dtype fp16 "${one[@]}" "${fast[@]}"
  sweep dequantize_other_cols dequantize --rows $rows --cols 1536,2048,2880,4096,16384 "${fast[@]}"
  sweep amax amax --rows $rows --cols 2048,7168,16384 "${fast[@]}"
  sweep relayout relayout --layout all --rows $rows --cols 7168 "${fast[@]}"
  sweep activation_bf16 activation --input bf16 --tokens 1,32,256,1024,4096,16384 "${fast[@]}"
}

# Later in the alphabet than `quantize`: where both measured a case, the longer replays count.
targets
$quick || full

if $peers; then
  if "$python" -c 'import torch, triton' 2> /dev/null; then
    peer_options=()
    ! $quick || peer_options=(--quick)
    "$python" "$root/bench/peers/run.py" "$out/peers.json" --commit "$commit" \
      --device "$device" "${peer_options[@]}" || status=1
  else
    echo "peers left out: $python has no torch and triton" >&2
  fi
fi

"$python" "$root/bench/report.py" "$out" --compact
"$python" "$root/bench/report.py" "$out"
exit $status
