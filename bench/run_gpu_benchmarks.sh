#!/usr/bin/env bash
# Measures this library on the GPU of this machine, and peers beside it, into OUT_DIR/*.json; then
# prints the tables with targets. docs/benchmarks.md has the method.
#
#     bench/run_gpu_benchmarks.sh OUT_DIR [--quick] [--only ops|moe] [--no-peers] [--build DIR]
#                                 [--device cuda:N]
#
# --quick measures the cases with targets only (about 20 s of operations and 60 s of MoE layers,
# without peers); --only one of the two. Peers need a python3 with torch and triton ($PYTHON names
# another), Humming and DeepGEMM also humming-kernels and sgl-deep-gemm from PyPI; what is not
# installed is left out. COMMIT, where it is set, is what the documents say was measured. The exit
# code is not 0 where a result was wrong.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
out="" quick=false peers=true build="" device=cuda:0 only=""
usage() {
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=true ;;
    --no-peers) peers=false ;;
    --build | --device | --only)
      [ $# -ge 2 ] || usage
      case "$1" in
        --build) build=$2 ;;
        --device) device=$2 ;;
        --only) only=$2 ;;
      esac
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
case "$only" in
  "" | ops | moe) ;;
  *) usage ;;
esac

cli=${build:-$root/build/sm90}/src/bench_cli/narrowfloat-bench
if [ ! -x "$cli" ]; then
  echo "run_gpu_benchmarks: $cli does not exist: build it with" >&2
  echo "  cmake --preset sm90 && cmake --build --preset sm90 --target narrowfloat_bench_cli" >&2
  exit 2
fi
# Shared libraries of executables that were built elsewhere, as in tools/gpu_check.sh.
libraries=${build:-$root/build/sm90}/lib
if [ -d "$libraries" ]; then
  LD_LIBRARY_PATH=$(cd "$libraries" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi
python=${PYTHON:-python3}
commit=${COMMIT:-$(git -C "$root" describe --always --dirty 2> /dev/null || echo unknown)}
mkdir -p "$out"
status=0

# document NAME COMMAND...: what it writes to stdout.
document() {
  local name=$1 start=$SECONDS code=0
  shift
  "$@" --device "$device" --commit "$commit" --json > "$out/$name.json" || code=$?
  [ $code -eq 0 ] || status=1
  # A device that failed, or options that do not fit this version, leave no document.
  [ -s "$out/$name.json" ] || rm -f "$out/$name.json"
  printf '%4d s  %s (exit code %d)\n' $((SECONDS - start)) "$name" "$code" >&2
}

# sweep NAME ARGUMENT...
sweep() { document "$1" "$cli" bench "${@:2}"; }

# layer SHAPE MODE TOKENS ARGUMENT...
layer() {
  document "moe_$1_$2" "$cli" moe bench --shape "$1" --mode "$2" --tokens "$3" --min-time 0.1 \
    "${@:4}"
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
  local op
  for op in group_quantize kv_cache shuffle pack_bits; do
    sweep "$op" "$op" --rows 1,32,1024,16384 --cols 1024,7168 "${fast[@]}"
  done
}

# gemm SHAPE ROWS: in a burst on a GPU that has rested, and for as long as lowers its clock.
gemm() {
  local name=moe_gemm_${1//,/_}
  sleep 0.5
  document "$name" "$cli" moe gemm --shape "$1" --rows "$2" --min-time 0.03
  document "${name}_long" "$cli" moe gemm --shape "$1" --rows "$2" --min-time 0.5
}

# The tables of whole layers and of grouped GEMMs with targets.
moe_targets() {
  local all=1,4,16,64,256,1024,4096
  gemm 4096,7168,8 16384
  gemm 7168,2048,8 16384
  gemm 4096,7168,32 114,6251,16384
  gemm 7168,2048,32 114,16384
  gemm 4096,7168,256 960,32768
  layer deepseek-v3 fp8_block $all --stages
  layer gpt-oss-120b mxfp4_bf16 $all --stages
  layer gpt-oss-120b mxfp4_fp8 $all --stages
  layer deepseek-v3 nvfp4_bf16 1,16,64,256,1024,4096 --stages
  layer deepseek-v3 nvfp4_fp8_rounded 1,16,64,256,1024,4096 --stages
  layer gpt-oss-120b mxfp4_fp8_token 1,16,64,256,1024,4096 --stages
  layer deepseek-v3 nvfp4_fp8_token 1,16,64,256,1024,4096 --stages
}

# Other shapes, and tokens that prefer some experts.
moe_others() {
  local few=1,64,1024
  layer qwen3-30b-a3b bf16 $few
  layer mixtral-8x7b fp8_block $few
  layer llama-4-scout bf16 $few
  layer kimi-k2 fp8_block $few
  document moe_zipf "$cli" moe bench --shape deepseek-v3 --tokens $few --routing zipf \
    --min-time 0.1
  # The document names the file: by its path in the repository.
  document moe_recorded env --chdir "$root" "$(realpath "$cli")" moe bench --shape 256,128,16,2 \
    --mode fp8_block --tokens $few --routing models/tiny-moe/calibration/activations.safetensors \
    --min-time 0.1
}

# Later in the alphabet than `quantize`: where both measured a case, the longer replays count.
if [ "$only" != moe ]; then
  targets
  $quick || full
fi
if [ "$only" != ops ]; then
  moe_targets
  $quick || moe_others
fi

if $peers; then
  if "$python" -c 'import torch, triton' 2> /dev/null; then
    peer_options=()
    ! $quick || peer_options=(--quick)
    [ "$only" = moe ] || "$python" "$root/bench/peers/run.py" "$out/peers.json" \
      --commit "$commit" --device "$device" "${peer_options[@]}" || status=1
    if [ "$only" != ops ]; then
      "$python" "$root/bench/peers/moe.py" "$out/moe_peers.json" --bench "$cli" \
        --commit "$commit" --device "$device" || status=1
      "$python" "$root/bench/peers/moe_gemm.py" "$out/moe_gemm_peers.json" --bench "$cli" \
        --commit "$commit" --device "$device" || status=1
    fi
  else
    echo "peers left out: $python has no torch and triton" >&2
  fi
fi

"$python" "$root/bench/report.py" "$out" --compact
"$python" "$root/bench/report.py" "$out"
exit $status
