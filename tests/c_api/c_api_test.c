// The C API from C99: formats, layouts, layers, all-reduce over two processes, errors, and structs
// of other sizes. Usage: c_api_test MODEL FOLDER, a model directory and a folder for files.
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "narrowfloat/narrowfloat_c.h"

static int failures = 0;

static void expect(int is_true, const char* what, int line) {
  if (is_true) return;
  fprintf(stderr, "line %d: expected %s; last error: %s\n", line, what, nf_last_error());
  ++failures;
}

#define NF_EXPECT(condition) expect((condition) != 0, #condition, __LINE__)
#define NF_EXPECT_OK(call) expect((call) == kNfOk, #call " to succeed", __LINE__)

static void expect_error(int32_t status, int32_t wanted, const char* text, int line) {
  if (status == wanted && strstr(nf_last_error(), text) != NULL) return;
  fprintf(stderr, "line %d: expected status %d with \"%s\", got %d: %s\n", line, (int)wanted, text,
          (int)status, nf_last_error());
  ++failures;
}

#define NF_EXPECT_ERROR(call, status, text) expect_error(call, status, text, __LINE__)

static struct NfTensor tensor(void* data, const char* dtype, int64_t rows, int64_t cols) {
  struct NfTensor made = {data, dtype, -1, 2, {rows, cols, 0, 0}, {0, 0, 0, 0}};
  return made;
}

static struct NfTensor cube(void* data, const char* dtype, int64_t a, int64_t b, int64_t c) {
  struct NfTensor made = {data, dtype, -1, 3, {a, b, c, 0}, {0, 0, 0, 0}};
  return made;
}

static uint32_t random_state = 1;

// In [-1, 1).
static float random_number(void) {
  random_state = random_state * 1664525u + 1013904223u;
  return (float)(random_state >> 8) / 8388608.0f - 1.0f;
}

static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static float from_bf16(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

static void test_quantize(void) {
  enum { kRows = 48, kCols = 128 };
  static float input[kRows * kCols];
  static float back[kRows * kCols];
  for (int i = 0; i < kRows * kCols; ++i) input[i] = random_number();
  struct NfQuantized linear = {sizeof(linear)};
  linear.device = -1;
  linear.format = "nvfp4";
  linear.layout = "linear";
  linear.rows = kRows;
  linear.cols = kCols;
  NF_EXPECT_OK(nf_quantized_sizes(&linear));
  NF_EXPECT(linear.values_bytes == kRows * kCols / 2 && linear.global_scales == 1);
  NF_EXPECT(linear.scales_bytes == kRows * kCols / 16);
  struct NfQuantized swizzled = linear;
  swizzled.layout = NULL;
  NF_EXPECT_OK(nf_quantized_sizes(&swizzled));
  NF_EXPECT(strcmp(swizzled.layout, "swizzled_128x4") == 0);
  NF_EXPECT(swizzled.scales_bytes == 128 * 8);

  float global_scale = 0;
  linear.values = malloc((size_t)linear.values_bytes);
  linear.scales = malloc((size_t)linear.scales_bytes);
  linear.global_scale = &global_scale;
  const struct NfTensor dense = tensor(input, "F32", kRows, kCols);
  const struct NfTensor result = tensor(back, "F32", kRows, kCols);
  NF_EXPECT_OK(nf_quantize(&dense, &linear, NULL, NULL));
  NF_EXPECT_OK(nf_dequantize(&linear, &result, NULL));
  double error = 0;
  double norm = 0;
  for (int i = 0; i < kRows * kCols; ++i) {
    error += pow((double)back[i] - (double)input[i], 2);
    norm += pow((double)input[i], 2);
  }
  NF_EXPECT(sqrt(error / norm) < 0.12 && sqrt(error / norm) > 0.02);

  // Scales take another layout and come back as they were.
  swizzled.scales = malloc((size_t)swizzled.scales_bytes);
  swizzled.values = linear.values;
  swizzled.global_scale = &global_scale;
  struct NfQuantized again = linear;
  again.scales = malloc((size_t)linear.scales_bytes);
  NF_EXPECT_OK(nf_relayout(&linear, &swizzled, NULL));
  NF_EXPECT(memcmp(linear.scales, swizzled.scales, (size_t)linear.scales_bytes) != 0);
  NF_EXPECT_OK(nf_relayout(&swizzled, &again, NULL));
  NF_EXPECT(memcmp(linear.scales, again.scales, (size_t)linear.scales_bytes) == 0);

  // A given scale halves the numbers that fit; the encode scale is an option.
  struct NfQuantizeOptions options = {sizeof(options)};
  options.encode_scale = 64;
  NF_EXPECT_OK(nf_quantize(&dense, &linear, &options, NULL));
  NF_EXPECT(global_scale == 1.0f / 64);
  options.math = "quick";
  NF_EXPECT_ERROR(nf_quantize(&dense, &linear, &options, NULL), kNfInvalidArgument, "quick");
  swizzled.format = "mxfp4";
  NF_EXPECT_ERROR(nf_relayout(&linear, &swizzled, NULL), kNfInvalidArgument, "nvfp4, got mxfp4");
  free(linear.values);
  free(linear.scales);
  free(swizzled.scales);
  free(again.scales);
}

static void test_structs_of_other_sizes(void) {
  struct {
    struct NfQuantized known;
    int64_t newer;
  } later = {{sizeof(later)}, 0};
  later.known.device = -1;
  later.known.format = "mxfp8";
  later.known.rows = 4;
  later.known.cols = 64;
  NF_EXPECT_OK(nf_quantized_sizes(&later.known));
  NF_EXPECT(later.known.values_bytes == 4 * 64);
  later.newer = 1;
  NF_EXPECT_ERROR(nf_quantized_sizes(&later.known), kNfInvalidArgument, "does not know");
  later.known.struct_size = 0;
  NF_EXPECT_ERROR(nf_quantized_sizes(&later.known), kNfInvalidArgument, "struct_size of at least");
}

static void* error_of_a_thread(void* unused) {
  (void)unused;
  NF_EXPECT(strcmp(nf_last_error(), "") == 0);
  NF_EXPECT_ERROR(nf_set_num_threads(-1), kNfInvalidArgument, "-1");
  return NULL;
}

static void test_errors(void) {
  struct NfQuantized quantized = {sizeof(quantized)};
  quantized.device = -1;
  quantized.format = "nvfp5";
  NF_EXPECT_ERROR(nf_quantized_sizes(&quantized), kNfInvalidArgument, "nvfp5");
  pthread_t thread;
  NF_EXPECT(pthread_create(&thread, NULL, error_of_a_thread, NULL) == 0);
  NF_EXPECT(pthread_join(thread, NULL) == 0);
  NF_EXPECT(strstr(nf_last_error(), "nvfp5") != NULL);
  NF_EXPECT_ERROR(nf_quantized_sizes(NULL), kNfInvalidArgument, "got NULL");
  quantized.format = "mxfp4";
  quantized.cols = 32;
  quantized.rows = 1;
  struct NfTensor input = tensor(&quantized, "BF17", 1, 32);
  NF_EXPECT_ERROR(nf_quantize(&input, &quantized, NULL, NULL), kNfInvalidArgument, "BF17");
  input.dtype = "F32";
  input.rank = 5;
  NF_EXPECT_ERROR(nf_quantize(&input, &quantized, NULL, NULL), kNfInvalidArgument, "rank");
  struct NfMoe* layer = NULL;
  NF_EXPECT_ERROR(nf_moe_load("/nonexistent", 0, NULL, &layer), kNfIo, "/nonexistent");
  NF_EXPECT(layer == NULL);
  nf_moe_free(NULL);
  nf_allreduce_free(NULL);
}

enum { kExperts = 3, kTopK = 2, kHidden = 64, kInter = 32, kTokens = 5 };

static double dot(const uint16_t* weights, const double* x, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += (double)from_bf16(weights[i]) * x[i];
  return sum;
}

// Runs a layer with a workspace of its own.
static int32_t run_layer(const struct NfMoe* layer, struct NfMoeRun* run, int64_t tokens) {
  int64_t bytes = 0;
  NF_EXPECT_OK(nf_moe_workspace_bytes(layer, tokens, &bytes));
  void* memory = NULL;
  NF_EXPECT(posix_memalign(&memory, 256, (size_t)bytes + 256) == 0);
  run->workspace = tensor(memory, "U8", 1, bytes);
  run->workspace.rank = 1;
  run->workspace.shape[0] = bytes;
  const int32_t status = nf_moe_run(layer, run, NULL);
  free(memory);
  return status;
}

static void test_layer_of_buffers(void) {
  static uint16_t w1[kExperts * 2 * kInter * kHidden];
  static uint16_t w2[kExperts * kHidden * kInter];
  static uint16_t hidden[kTokens * kHidden];
  static float out[kTokens * kHidden];
  for (size_t i = 0; i < sizeof(w1) / 2; ++i) w1[i] = to_bf16(random_number() / 4);
  for (size_t i = 0; i < sizeof(w2) / 2; ++i) w2[i] = to_bf16(random_number() / 4);
  for (size_t i = 0; i < sizeof(hidden) / 2; ++i) hidden[i] = to_bf16(random_number());
  int32_t ids[kTokens * kTopK];
  float weights[kTokens * kTopK];
  for (int i = 0; i < kTokens * kTopK; ++i) {
    ids[i] = (i + i / kTopK) % kExperts;
    weights[i] = 0.25f * (float)(1 + i % 3);
  }

  struct NfMoeConfig config = {sizeof(config)};
  config.experts = kExperts;
  config.top_k = kTopK;
  config.hidden = kHidden;
  config.inter = kInter;
  config.gate_order = "gate_up";
  config.out_dtype = "F32";
  struct NfMoeWeights given = {sizeof(given)};
  given.w1 = cube(w1, "BF16", kExperts, 2 * kInter, kHidden);
  given.w2 = cube(w2, "BF16", kExperts, kHidden, kInter);
  struct NfMoe* layer = NULL;
  NF_EXPECT_OK(nf_moe_prepare(&config, &given, NULL, &layer));
  struct NfMoeInfo info = {sizeof(info)};
  NF_EXPECT_OK(nf_moe_info(layer, &info));
  NF_EXPECT(info.hidden == kHidden && info.top_k == kTopK && info.weight_bytes > 0);
  NF_EXPECT(strcmp(info.mode, "bf16") == 0 && info.router_weight.data == NULL);

  struct NfMoeRun run = {sizeof(run)};
  run.hidden = tensor(hidden, "BF16", kTokens, kHidden);
  run.ids = tensor(ids, "I32", kTokens, kTopK);
  run.weights = tensor(weights, "F32", kTokens, kTopK);
  run.out = tensor(out, "F32", kTokens, kHidden);
  NF_EXPECT_OK(run_layer(layer, &run, kTokens));
  double error = 0;
  double norm = 0;
  for (int t = 0; t < kTokens; ++t) {
    double x[kHidden];
    double wanted[kHidden] = {0};
    for (int i = 0; i < kHidden; ++i) x[i] = (double)from_bf16(hidden[t * kHidden + i]);
    for (int s = 0; s < kTopK; ++s) {
      const uint16_t* first = w1 + ids[t * kTopK + s] * 2 * kInter * kHidden;
      const uint16_t* second = w2 + ids[t * kTopK + s] * kHidden * kInter;
      double inner[kInter];
      for (int i = 0; i < kInter; ++i) {
        const double gate = dot(first + i * kHidden, x, kHidden);
        inner[i] = gate / (1 + exp(-gate)) * dot(first + (kInter + i) * kHidden, x, kHidden);
      }
      for (int i = 0; i < kHidden; ++i) {
        wanted[i] += (double)weights[t * kTopK + s] * dot(second + i * kInter, inner, kInter);
      }
    }
    for (int i = 0; i < kHidden; ++i) {
      error += pow((double)out[t * kHidden + i] - wanted[i], 2);
      norm += pow(wanted[i], 2);
    }
  }
  NF_EXPECT(sqrt(error / norm) < 0.01 && norm > 0);
  run.workspace.shape[0] = 16;
  NF_EXPECT_ERROR(nf_moe_run(layer, &run, NULL), kNfInvalidArgument, "workspace");
  struct NfMoe* other = NULL;
  config.fast_sums = 2;
  NF_EXPECT_ERROR(nf_moe_prepare(&config, &given, NULL, &other), kNfInvalidArgument,
                  "config.fast_sums: expected 0 or 1, got 2");
  // The struct of a program that was compiled before it had the last members.
  config.struct_size = offsetof(struct NfMoeConfig, fast_sums);
  NF_EXPECT_OK(nf_moe_prepare(&config, &given, NULL, &other));
  nf_moe_free(other);
  other = NULL;
  config.struct_size -= 8;
  NF_EXPECT_ERROR(nf_moe_prepare(&config, &given, NULL, &other), kNfInvalidArgument,
                  "struct_size of at least");
  config.struct_size = sizeof(config);
  config.fast_sums = 0;
  config.mode = "bf17";
  NF_EXPECT_ERROR(nf_moe_prepare(&config, &given, NULL, &other), kNfInvalidArgument, "bf17");
  NF_EXPECT(other == NULL);
  nf_moe_free(layer);

  config.mode = "fp8_block";
  given.w1 = cube(w1, "F8_E4M3", kExperts, 2 * kInter, kHidden);
  given.w2 = cube(w2, "F8_E4M3", kExperts, kHidden, kInter);
  given.w1_scales = cube(out, "BF16", kExperts, 1, 1);
  NF_EXPECT_ERROR(nf_moe_prepare(&config, &given, NULL, &other), kNfInvalidArgument,
                  "weights.w1_scales: expected dtype F32, got BF16");
  given.w1_scales = cube(out, "F32", kExperts, 1, 1);
  given.w1_scales.strides[0] = 2;
  given.w1_scales.strides[1] = given.w1_scales.strides[2] = 1;
  NF_EXPECT_ERROR(nf_moe_prepare(&config, &given, NULL, &other), kNfInvalidArgument,
                  "weights.w1_scales: expected a dense row-major tensor");
  NF_EXPECT(other == NULL);
}

// A layer of a model gives the same for logits and for the routing that they stand for.
static void test_layer_of_a_checkpoint(const char* model) {
  struct NfMoeLoadOptions options = {sizeof(options)};
  options.mode = "nvfp4_bf16";
  options.out_dtype = "F32";
  struct NfMoe* layer = NULL;
  NF_EXPECT_OK(nf_moe_load(model, 0, &options, &layer));
  if (layer == NULL) return;
  struct NfMoeInfo info = {sizeof(info)};
  NF_EXPECT_OK(nf_moe_info(layer, &info));
  NF_EXPECT(info.router_weight.data != NULL && info.router_weight.shape[1] == info.hidden);
  const int32_t experts = info.experts;
  const int64_t size = info.hidden;
  uint16_t* hidden = malloc((size_t)size * 2);
  float* logits = calloc((size_t)experts, sizeof(float));
  float* out = malloc((size_t)size * 4);
  float* again = malloc((size_t)size * 4);
  int32_t* ids = malloc((size_t)info.top_k * 4);
  float* weights = malloc((size_t)info.top_k * 4);
  for (int64_t i = 0; i < size; ++i) hidden[i] = to_bf16(random_number());
  const float* router = info.router_weight.data;
  for (int32_t e = 0; e < experts; ++e) {
    for (int64_t i = 0; i < size; ++i) logits[e] += router[e * size + i] * from_bf16(hidden[i]);
  }
  struct NfMoeRun run = {sizeof(run)};
  run.hidden = tensor(hidden, "BF16", 1, size);
  run.logits = tensor(logits, "F32", 1, experts);
  run.out = tensor(out, "F32", 1, size);
  NF_EXPECT_OK(run_layer(layer, &run, 1));
  float sum = 0;
  for (int32_t k = 0; k < info.top_k; ++k) {
    int32_t best = 0;
    for (int32_t e = 1; e < experts; ++e) best = logits[e] > logits[best] ? e : best;
    ids[k] = best;
    weights[k] = expf(logits[best]);
    sum += weights[k];
    logits[best] = -INFINITY;
  }
  for (int32_t k = 0; k < info.top_k; ++k) weights[k] /= sum;
  memset(&run.logits, 0, sizeof(run.logits));
  run.ids = tensor(ids, "I32", 1, info.top_k);
  run.weights = tensor(weights, "F32", 1, info.top_k);
  run.out.data = again;
  NF_EXPECT_OK(run_layer(layer, &run, 1));
  float largest = 0;
  float distance = 0;
  for (int64_t i = 0; i < size; ++i) {
    largest = fmaxf(largest, fabsf(out[i]));
    distance = fmaxf(distance, fabsf(out[i] - again[i]));
  }
  NF_EXPECT(largest > 0 && distance <= largest / 128);
  free(hidden);
  free(logits);
  free(out);
  free(again);
  free(ids);
  free(weights);
  nf_moe_free(layer);
}

// The parts of two ranks of tensor parallelism add up to the layer.
static void test_tensor_parallel_layer(const char* model) {
  struct NfMoeLoadOptions options = {sizeof(options)};
  options.mode = "bf16";
  options.out_dtype = "F32";
  options.fast_sums = -1;
  struct NfMoe* layer = NULL;
  NF_EXPECT_ERROR(nf_moe_load(model, 0, &options, &layer), kNfInvalidArgument, "options.fast_sums");
  options.fast_sums = 0;
  options.tensor_rank = 2;
  options.tensor_ranks = 2;
  NF_EXPECT_ERROR(nf_moe_load(model, 0, &options, &layer), kNfInvalidArgument, "tensor_rank");
  NF_EXPECT(layer == NULL);
  int64_t whole = 0;
  int64_t parts = 0;
  float* sums[2] = {NULL, NULL};  // Of one rank, and of two.
  for (int32_t ranks = 1; ranks <= 2; ++ranks) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      options.tensor_rank = rank;
      options.tensor_ranks = ranks;
      NF_EXPECT_OK(nf_moe_load(model, 0, &options, &layer));
      if (layer == NULL) return;
      struct NfMoeInfo info = {sizeof(info)};
      NF_EXPECT_OK(nf_moe_info(layer, &info));
      *(ranks == 1 ? &whole : &parts) += info.inter;
      const size_t size = (size_t)info.hidden;
      uint16_t* hidden = malloc(size * 2);
      float* out = malloc(size * 4);
      int32_t* ids = malloc((size_t)info.top_k * 4);
      float* weights = malloc((size_t)info.top_k * 4);
      for (size_t i = 0; i < size; ++i) hidden[i] = to_bf16((float)(i % 7) - 3);
      for (int32_t k = 0; k < info.top_k; ++k) ids[k] = k;
      for (int32_t k = 0; k < info.top_k; ++k) weights[k] = 1;
      struct NfMoeRun run = {sizeof(run)};
      run.hidden = tensor(hidden, "BF16", 1, info.hidden);
      run.ids = tensor(ids, "I32", 1, info.top_k);
      run.weights = tensor(weights, "F32", 1, info.top_k);
      run.out = tensor(out, "F32", 1, info.hidden);
      NF_EXPECT_OK(run_layer(layer, &run, 1));
      float** sum = &sums[ranks - 1];
      if (*sum == NULL) *sum = calloc(size, 4);
      for (size_t i = 0; i < size; ++i) (*sum)[i] += out[i];
      if (rank == 1) {
        float largest = 0;
        float distance = 0;
        for (size_t i = 0; i < size; ++i) {
          largest = fmaxf(largest, fabsf(sums[0][i]));
          distance = fmaxf(distance, fabsf(sums[0][i] - sums[1][i]));
        }
        NF_EXPECT(largest > 0 && distance <= largest / 128);  // Slots are rounded to bf16.
      }
      free(hidden);
      free(out);
      free(ids);
      free(weights);
      nf_moe_free(layer);
    }
  }
  NF_EXPECT(whole == parts && whole > 0);
  free(sums[0]);
  free(sums[1]);
}

// One of two ranks.
static int rank_of_two(int32_t rank, const char* folder) {
  struct NfAllReduceOptions options = {sizeof(options)};
  options.device = -1;
  options.rank = rank;
  options.ranks = 2;
  options.directory = folder;
  options.dtype = "F32";
  options.deadline_ms = 20000;
  struct NfAllReduce* group = NULL;
  NF_EXPECT_OK(nf_allreduce_create(&options, &group));
  if (group == NULL) return failures;
  float input[2 * 64];
  float out[2 * 64];
  for (int i = 0; i < 2 * 64; ++i) input[i] = (float)(i + 1000 * rank);
  struct NfAllReduceCall call = {sizeof(call)};
  call.input = tensor(input, "F32", 2, 64);
  call.out = tensor(out, "F32", 2, 64);
  NF_EXPECT_OK(nf_allreduce_run(group, &call, NULL));
  for (int i = 0; i < 2 * 64; ++i) NF_EXPECT(out[i] == (float)(2 * i + 1000));
  call.pattern = "all";
  NF_EXPECT_ERROR(nf_allreduce_run(group, &call, NULL), kNfInvalidArgument, "residual_rmsnorm");
  NF_EXPECT_OK(nf_allreduce_check(group));
  NF_EXPECT_OK(nf_allreduce_destroy(group));
  nf_allreduce_free(group);
  return failures;
}

static void test_allreduce_of_two_processes(const char* folder) {
  const pid_t child = fork();
  if (child == 0) _exit(rank_of_two(1, folder) == 0 ? 0 : 1);
  rank_of_two(0, folder);
  int status = 1;
  NF_EXPECT(waitpid(child, &status, 0) == child);
  NF_EXPECT(status == 0);
}

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: c_api_test MODEL FOLDER\n");
    return 2;
  }
  test_allreduce_of_two_processes(argv[2]);  // Before the library has threads.
  NF_EXPECT(strcmp(nf_version(), "") != 0);
  test_quantize();
  test_structs_of_other_sizes();
  test_errors();
  test_layer_of_buffers();
  test_layer_of_a_checkpoint(argv[1]);
  test_tensor_parallel_layer(argv[1]);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
