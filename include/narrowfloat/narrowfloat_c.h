// The C API: quantize, dequantize, scale layouts, Mixture-of-Experts layers and all-reduce, for
// C99, C++ and whatever calls C. docs/c_api.md has the rules; the headers named below have the
// meaning of each operation. Link the shared library libnarrowfloat.
//
//   * Every function that can fail returns a status. nf_last_error() is the message of the calling
//     thread's last failure. Nothing is written where arguments are refused.
//   * Formats, layouts, modes and types are texts, the ones of the command line and of Python.
//   * A struct that may grow begins with struct_size, which is sizeof of the caller's struct. Zero
//     in any member stands for its default, so start from `struct NfX x = {sizeof(x)}`. Members
//     that a library does not know must be zero.
//   * The caller owns all memory. Texts that the library returns are constants. Objects are freed
//     by the function that is named at their creation.
#pragma once

#include <stdint.h>

#include "narrowfloat/export.h"

#ifdef __cplusplus
extern "C" {
#endif

// The kinds of error.h. Out of memory and faults of the library have numbers of their own.
enum NfStatus {
  kNfOk = 0,
  kNfInvalidArgument = 1,
  kNfUnsupported = 2,
  kNfCorruptData = 3,
  kNfIo = 4,
  kNfDevice = 5,
  kNfOutOfMemory = 6,
  kNfInternal = 7,
};

// "0.1.0".
NARROWFLOAT_API const char* nf_version(void);  // NOLINT(modernize-redundant-void-arg): C
// Valid until the next failure in this thread; "" before the first one.
NARROWFLOAT_API const char* nf_last_error(void);  // NOLINT(modernize-redundant-void-arg): C
// Upper bound on threads of operations on the CPU; 0: all cores.
NARROWFLOAT_API int32_t nf_set_num_threads(int32_t count);

// tensor.h. A tensor whose data is NULL and whose rank is 0 is absent.
struct NfTensor {
  void* data;         // Operations do not write through their inputs.
  const char* dtype;  // "BF16", "F16", "F32", "F8_E4M3", "F8_E8M0", "U8", "I32", ...
  int32_t device;     // -1 for the CPU, else the number of a CUDA device.
  int32_t rank;       // 0 to 4.
  int64_t shape[4];
  int64_t strides[4];  // In elements; all zero: dense rows.
};

// A quantized [batch, rows, cols] tensor (format.h): its meaning, its sizes and its buffers.
struct NfQuantized {
  uint32_t struct_size;
  int32_t device;      // As in NfTensor.
  const char* format;  // "nvfp4", "mxfp4", "mxfp8", "fp8_1x128", ...
  const char* layout;  // NULL: the format's default.
  int64_t batch;       // 0: 1.
  int64_t rows;
  int64_t cols;
  int64_t alignment;     // MXFP8: columns are padded to a multiple of it. 0: 32.
  int64_t value_cols;    // From here on nf_quantized_sizes() writes,
  int64_t values_bytes;  // the other functions do not read it.
  int64_t scales_bytes;
  int64_t global_scales;  // F32 numbers.
  void* values;           // Buffers of these sizes; nf_quantized_sizes() leaves them alone.
  void* scales;
  float* global_scale;
};

struct NfQuantizeOptions {
  uint32_t struct_size;
  float encode_scale;    // NVFP4: 0 computes it from the tensor's maximum.
  const char* math;      // "exact" (default) or "fast".
  const char* mx_scale;  // "up" (default), "floor" or "even".
};

// Writes sizes, and the layout where it is NULL.
NARROWFLOAT_API int32_t nf_quantized_sizes(struct NfQuantized* quantized);
// quantize.h. options may be NULL; stream is a cudaStream_t, NULL for the default one.
NARROWFLOAT_API int32_t nf_quantize(const struct NfTensor* input, const struct NfQuantized* output,
                                    const struct NfQuantizeOptions* options, void* stream);
NARROWFLOAT_API int32_t nf_dequantize(const struct NfQuantized* input,
                                      const struct NfTensor* output, void* stream);
// Copies the scales of a tensor into those of another with the same format and extents.
NARROWFLOAT_API int32_t nf_relayout(const struct NfQuantized* input,
                                    const struct NfQuantized* output, void* stream);

// moe.h.
struct NfMoeConfig {
  uint32_t struct_size;
  int32_t experts;
  int64_t hidden;
  int64_t inter;
  int32_t top_k;
  int32_t expert_offset;
  int32_t local_experts;   // 0: all from expert_offset on.
  int32_t n_group;         // "deepseek_v3"; 0: no groups.
  int32_t topk_group;      // 0: 1.
  float routed_scale;      // 0: 1.
  const char* mode;        // NULL: "bf16".
  const char* routing;     // NULL: "renormalize".
  const char* gate_order;  // NULL: "up_gate".
  const char* activation;  // NULL: "swiglu".
  float alpha;             // 0: 1.
  float beta;              // The default is 0.
  float limit_gate;        // 0: none.
  float limit_up;
  const char* out_dtype;  // NULL: "BF16".
  int32_t fast_sums;      // 1: MoeConfig::fast_sums. Structs that end before it are taken, too.
  int32_t reserved;       // 0.
};

// The weights lie on one device; absent factors are 1. See MoeWeights.
struct NfMoeWeights {
  uint32_t struct_size;
  int32_t reserved;           // 0.
  const char* scale_layout;   // NULL: "linear".
  struct NfTensor w1;         // [experts, F1, H], or bytes with two codes each.
  struct NfTensor w1_scales;  // [experts, rows, blocks], or flat where the layout pads.
  struct NfTensor w2;
  struct NfTensor w2_scales;
  struct NfTensor up_scale;  // F32 [experts].
  struct NfTensor gate_scale;
  struct NfTensor down_scale;
  struct NfTensor input_multiplier;
  struct NfTensor inter_multiplier;
  struct NfTensor bias1;
  struct NfTensor bias2;
};

// moe_checkpoint.h.
struct NfMoeLoadOptions {
  uint32_t struct_size;
  int32_t expert_offset;
  int32_t local_experts;  // 0: all from expert_offset on.
  float input_amax;       // 0: not given.
  float inter_amax;
  int32_t tensor_rank;  // Tensor parallelism: the part of each expert's intermediate that this rank
  int32_t tensor_ranks;   // of tensor_ranks has. The caller adds the outputs of all. 0: 1.
  int32_t fast_sums;      // As in NfMoeConfig.
  const char* mode;       // NULL: by the stored weights.
  const char* out_dtype;  // NULL: "BF16".
};

struct NfMoeInfo {
  uint32_t struct_size;
  int32_t experts;
  int32_t top_k;
  int32_t local_experts;
  int64_t hidden;
  int64_t inter;
  int64_t weight_bytes;
  const char* mode;
  // A layer of a checkpoint: F32 [E, H], [E] and [E], valid as long as the layer. Absent where
  // there is none. Logits are x @ router_weight.T + router_logit_bias; router_bias is
  // NfMoeRun.bias.
  struct NfTensor router_weight;
  struct NfTensor router_logit_bias;
  struct NfTensor router_bias;
};

// One call: either logits (with bias), or ids and weights.
struct NfMoeRun {
  uint32_t struct_size;
  int32_t reserved;        // 0.
  struct NfTensor hidden;  // [T, H]: BF16, F16 or F32, or rows in the mode's input format.
  struct NfTensor scales;  // Quantized rows alone have them.
  struct NfTensor row_scale;
  struct NfTensor logits;     // F32, BF16 or F16 [T, E].
  struct NfTensor bias;       // F32 or BF16 [E].
  struct NfTensor ids;        // I32 or I64 [T, k].
  struct NfTensor weights;    // F32 or BF16 [T, k].
  struct NfTensor out;        // [T, H].
  struct NfTensor workspace;  // U8, at least nf_moe_workspace_bytes(), aligned to 256 bytes.
};

struct NfMoe;

// Makes a layer from buffers, on the device where w1 lies. The weights may be freed afterwards.
// Freed by nf_moe_free().
NARROWFLOAT_API int32_t nf_moe_prepare(const struct NfMoeConfig* config,
                                       const struct NfMoeWeights* weights, void* stream,
                                       struct NfMoe** layer);
// Makes a layer of a checkpoint directory, on the CPU. options may be NULL. Freed by nf_moe_free().
NARROWFLOAT_API int32_t nf_moe_load(const char* directory, int64_t layer_idx,
                                    const struct NfMoeLoadOptions* options, struct NfMoe** layer);
NARROWFLOAT_API int32_t nf_moe_info(const struct NfMoe* layer, struct NfMoeInfo* info);
NARROWFLOAT_API int32_t nf_moe_workspace_bytes(const struct NfMoe* layer, int64_t tokens,
                                               int64_t* bytes);
// Several threads may run one layer at once, each with a workspace of its own.
NARROWFLOAT_API int32_t nf_moe_run(const struct NfMoe* layer, const struct NfMoeRun* run,
                                   void* stream);
// NULL is allowed.
NARROWFLOAT_API void nf_moe_free(struct NfMoe* layer);

// allreduce.h, bootstrap.h.
struct NfAllReduceOptions {
  uint32_t struct_size;
  int32_t device;  // As in NfTensor.
  int32_t rank;    // With a directory.
  int32_t ranks;
  const char* directory;  // Ranks meet by files in it. NULL: by what a launcher says.
  const char* job;        // The same text on all ranks of a job, another for each job; or NULL.
  const char* dtype;      // NULL: "BF16". F16 and BF16 share workspaces.
  int64_t deadline_ms;    // 0: the defaults, for meeting and for each wait.
  int64_t oneshot_bytes;  // 0: the defaults.
  int64_t twoshot_bytes;
};

// One call; all ranks give the same pattern and shapes.
struct NfAllReduceCall {
  uint32_t struct_size;
  float eps;                 // 0: 1e-6. A row of zeros has no norm without one, so 0 is no eps.
  const char* pattern;       // NULL: "allreduce"; "residual_rmsnorm", "nvfp4", "norm_fp8", ...
  const char* scale_layout;  // NULL: "swizzled_128x4".
  float weight_bias;
  int32_t group;
  struct NfTensor input;  // [tokens, hidden].
  struct NfTensor out;
  struct NfTensor residual_in;
  struct NfTensor residual_out;
  struct NfTensor gamma;
  struct NfTensor norm_out;
  struct NfTensor quant_out;
  struct NfTensor scale_out;
  struct NfTensor row_scale_out;
  struct NfTensor global_scale;
};

struct NfAllReduce;

// Collective. Freed by nf_allreduce_free().
NARROWFLOAT_API int32_t nf_allreduce_create(const struct NfAllReduceOptions* options,
                                            struct NfAllReduce** group);
NARROWFLOAT_API int32_t nf_allreduce_run(struct NfAllReduce* group,
                                         const struct NfAllReduceCall* call, void* stream);
// Fails if an earlier call did. On a GPU, synchronize with the stream first.
NARROWFLOAT_API int32_t nf_allreduce_check(const struct NfAllReduce* group);
// Collective: waits for all ranks. Only nf_allreduce_free() takes the group afterwards.
NARROWFLOAT_API int32_t nf_allreduce_destroy(struct NfAllReduce* group);
// NULL is allowed. Does not wait for other ranks: call nf_allreduce_destroy() first.
NARROWFLOAT_API void nf_allreduce_free(struct NfAllReduce* group);

#ifdef __cplusplus
}  // extern "C"
#endif
