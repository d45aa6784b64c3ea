// narrowfloat: block-scaled 4-bit and 8-bit floating point. Start here.
//
//   format.h          the formats, scale layouts, and views of quantized tensors
//   quantize.h        quantize, dequantize, fused variants, scale layouts, maxima
//   group_quantize.h  8-bit quantization with a scale per group of columns
//   kv_cache.h        KV caches in NVFP4: rows, pages, appending
//   shuffle.h         rows and scales in the order of epilogue-tiled GEMMs
//   pack_bits.h       booleans as bits
//   moe.h             the fused Mixture-of-Experts layer; it includes the headers of its stages:
//                     route.h, permute.h, gemm.h, activation.h, combine.h, and moe_types.h
//   moe_tuning.h      measured token tiles for it
//   moe_checkpoint.h  such a layer from a checkpoint
//   checkpoint.h      whole checkpoints: quantize, dequantize, inspect, compare
//   check.h           what is wrong with a checkpoint, and repairs
//   safetensors.h     single files
//   allreduce.h       all-reduce over GPUs, fused with residual, RMSNorm and quantization
//   expert_parallel.h experts of a layer on several ranks
//   expert_placement.h which experts each of these ranks holds
//   bootstrap.h       how the ranks of a group find each other
//   runtime.h         threads, and which implementation runs where and why
//   error.h           the exception all of them throw
//   narrowfloat_c.h   the same for C and other languages (not included here)
#pragma once

#include "narrowfloat/activation.h"        // IWYU pragma: export
#include "narrowfloat/allreduce.h"         // IWYU pragma: export
#include "narrowfloat/bootstrap.h"         // IWYU pragma: export
#include "narrowfloat/check.h"             // IWYU pragma: export
#include "narrowfloat/checkpoint.h"        // IWYU pragma: export
#include "narrowfloat/combine.h"           // IWYU pragma: export
#include "narrowfloat/error.h"             // IWYU pragma: export
#include "narrowfloat/expert_parallel.h"   // IWYU pragma: export
#include "narrowfloat/expert_placement.h"  // IWYU pragma: export
#include "narrowfloat/format.h"            // IWYU pragma: export
#include "narrowfloat/gemm.h"              // IWYU pragma: export
#include "narrowfloat/group_quantize.h"    // IWYU pragma: export
#include "narrowfloat/kv_cache.h"          // IWYU pragma: export
#include "narrowfloat/moe.h"               // IWYU pragma: export
#include "narrowfloat/moe_checkpoint.h"    // IWYU pragma: export
#include "narrowfloat/moe_tuning.h"        // IWYU pragma: export
#include "narrowfloat/moe_types.h"         // IWYU pragma: export
#include "narrowfloat/pack_bits.h"         // IWYU pragma: export
#include "narrowfloat/permute.h"           // IWYU pragma: export
#include "narrowfloat/quantize.h"          // IWYU pragma: export
#include "narrowfloat/route.h"             // IWYU pragma: export
#include "narrowfloat/runtime.h"           // IWYU pragma: export
#include "narrowfloat/safetensors.h"       // IWYU pragma: export
#include "narrowfloat/shuffle.h"           // IWYU pragma: export
#include "narrowfloat/tensor.h"            // IWYU pragma: export
