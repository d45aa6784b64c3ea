#!/usr/bin/env bash
# The all-reduce and expert parallelism on several GPUs of one host, in one command. It needs at
# least 2 GPUs; with --cpu it runs the same steps on CPU ranks, small, so that this script itself
# stays in order.
#
#     tools/multi_gpu_check.sh [--cpu] [--soak CALLS] [BUILD_DIR [OUT_DIR]]
#                              default: build/sm90 (--cpu: build/cpu), BUILD_DIR/multi_gpu_check
#
# Steps: links and peer access; soaks of random calls over each transport, every output of which is
# compared with the oracle's, so that ranks, algorithms, runs and batch sizes agree to the byte; a
# rank that is killed, which all others must report in time; latency tables of every pattern with
# NCCL's all-reduce and the stand-alone epilogue beside them; dispatch and combine of expert
# parallelism by each transport, checked, and whole layers. Runs with 2 ranks, and with 4 where there are so many
# GPUs. Writes JSON and logs to OUT_DIR, ends with a table of the steps, and fails if any of them
# did; a failed step does not stop the others. docs/allreduce.md has the method.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

usage() {
  sed -n '6,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

on_cpu=false
soak_calls=100000
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu)
      on_cpu=true
      soak_calls=300
      ;;
    --soak)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage
      soak_calls=$2
      shift
      ;;
    -*) usage ;;
    *) break ;;
  esac
  shift
done
default_build=build/sm90
! $on_cpu || default_build=build/cpu
build=${1:-$default_build}
out=${2:-$build/multi_gpu_check}
cli=$build/src/cli/narrowfloat
bench=$build/src/bench_cli/narrowfloat-bench
if [ ! -x "$cli" ] || [ ! -x "$bench" ]; then
  echo "multi_gpu_check: no programs in $build: build narrowfloat_cli and narrowfloat_bench_cli" >&2
  exit 2
fi
rm -rf "$out"
mkdir -p "$out"

# NVLink multicast stays off: on a shared host it can put the GPUs out of service for everybody.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

if $on_cpu; then
  place=(--processes)
  transports=(shared_memory)
  rank_counts=(2 4)
  soak_shape=8x128
  batch_shape=32x128
  deadline=1000
  tables=("1x128,8x128")
  experts_on=cpu
  shapes=(256,128,8,2)
  expert_tokens=1
  time=(--min-time 0)
else
  num_gpus=$("$cli" doctor --json | grep -c '"compute_capability"')
  if ((num_gpus < 2)); then
    echo "multi_gpu_check: needs at least 2 GPUs, found $num_gpus; --cpu runs on CPU ranks" >&2
    exit 2
  fi
  place=(--on gpus)
  transports=(cuda_vmm cuda_ipc)
  rank_counts=(2)
  ((num_gpus < 4)) || rank_counts+=(4)
  soak_shape=64x7168
  batch_shape=512x7168
  deadline=5000
  experts_on=gpus
  shapes=(deepseek-v3 gpt-oss-120b)
  expert_tokens=1,16,128,1024
  tables=()
  for hidden in 2880 7168; do
    tables+=("1x$hidden,16x$hidden,128x$hidden,512x$hidden,2048x$hidden")
  done
  time=(--min-time 0.05)
fi

# NCCL may be found on a machine without GPUs, but CPU ranks do not use it.
has_nccl=false
$on_cpu || ! "$cli" doctor --json | grep -q '"found": true' || has_nccl=true

num_failed=0
summary=$out/steps.txt

# Expert parallelism without peer memory: over NCCL on GPUs, the bootstrap's messages on CPUs.
expert_transports=()
! $on_cpu || expert_transports=(all_gather)
! $has_nccl || expert_transports=(all_to_all all_gather)

# step NAME COMMAND...: the output goes to NAME.json (or .txt) and NAME.log.
step() {
  local name=$1 start=$SECONDS result=passed
  shift
  local suffix=txt
  [[ " $* " != *" --json "* ]] || suffix=json
  if ! timeout 900 "$@" > "$out/$name.$suffix" 2> "$out/$name.log"; then
    result=FAILED
    num_failed=$((num_failed + 1))
    echo "== $name"
    tail -n 15 "$out/$name.log"
  fi
  printf '%-40s %-8s %5d s\n' "$name" "$result" $((SECONDS - start)) >> "$summary"
}

# transport_options NAME: CPU ranks have one transport and no option for it.
transport_options() {
  $on_cpu || printf '%s\n' --transport "$1"
}

step doctor "$cli" doctor
step doctor_document "$cli" doctor --json
if ! $on_cpu; then
  step topology nvidia-smi topo -m
  step peer_reads nvidia-smi topo -p2p r
  step peer_writes nvidia-smi topo -p2p w
  step peer_atomics nvidia-smi topo -p2p a
  step nvlink nvidia-smi nvlink -s
fi

for ranks in "${rank_counts[@]}"; do
  for transport in "${transports[@]}"; do
    mapfile -t options < <(transport_options "$transport")
    step "soak_${ranks}_$transport" "$bench" allreduce --ranks "$ranks" "${place[@]}" \
      "${options[@]}" --shape "$soak_shape" --pattern all --soak "$soak_calls" --json
  done
  step "soak_${ranks}_fp32" "$bench" allreduce --ranks "$ranks" "${place[@]}" --element f32 \
    --shape "$soak_shape" --pattern all --soak $((soak_calls / 10)) --json
  # The first token of each pattern is alone and among others.
  step "batches_$ranks" "$bench" allreduce --ranks "$ranks" "${place[@]}" --shape "$batch_shape" \
    --pattern all --soak 100 --json
  for killed in 0 $((ranks - 1)); do
    step "kill_${ranks}_$killed" "$bench" allreduce --ranks "$ranks" "${place[@]}" \
      --shape "$soak_shape" --pattern all --soak 200 --kill-rank "$killed" \
      --deadline "$deadline" --json
  done
done

# One algorithm after the other: the same bytes, and where each is the fastest.
for ranks in "${rank_counts[@]}"; do
  for table in "${tables[@]}"; do
    hidden=${table##*x}
    group=128
    ((hidden % 128 == 0)) || group=64
    for algorithm in auto oneshot twoshot; do
      step "latency_${ranks}_${hidden}_$algorithm" "$bench" allreduce --ranks "$ranks" \
        "${place[@]}" --shape "$table" --pattern all --group "$group" --algorithm "$algorithm" \
        "${time[@]}" --json
    done
    $has_nccl && step "latency_${ranks}_${hidden}_nccl_exact" "$bench" allreduce --ranks "$ranks" \
      "${place[@]}" --shape "$table" --pattern allreduce,norm_nvfp4 --algorithm nccl_exact \
      "${time[@]}" --json
  done
done

for ranks in "${rank_counts[@]}"; do
  for shape in "${shapes[@]}"; do
    step "experts_${ranks}_$shape" "$bench" experts --ranks "$ranks" --on "$experts_on" \
      --shape "$shape" --tokens "$expert_tokens" "${time[@]}" --json
  done
  for transport in "${expert_transports[@]}"; do
    step "experts_${ranks}_$transport" "$bench" experts --ranks "$ranks" --on "$experts_on" \
      --shape "${shapes[-1]}" --tokens "$expert_tokens" --transport "$transport" --no-layer \
      "${time[@]}" --json
  done
done

cat "$out/doctor.txt" "$summary"
if ((num_failed > 0)); then
  echo "FAILED: $num_failed steps; logs are in $out"
  exit 1
fi
echo "all checks passed; results are in $out"
