// Expert parallelism on GPUs: the kernels that plan, send and receive tokens, and return and sum
// results (docs/parallel.md). Everything is queued on a stream, in the order of this file; sizes
// are those of the host's arguments, and no count is read there. It needs no CUDA header.
//
//   plan_tokens     ids -> places of the tokens in the blocks that go to each rank, counts
//   send_tokens     rows -> the block of each rank, then a flag for each of them
//   receive_tokens  waits for the flags of all ranks; ids of rows that nobody sent become -1
//   send_results    a flag for each rank: the results that the experts stored are complete
//   sum_results     waits for the flags of all ranks, then sums the rows that they computed
//
// Blocks lie in the memory of other ranks, and flags tell of them; or they lie in this rank's own
// memory, and something between these kernels moves them: kNoFlags. receive_tokens then also copies
// the rows to where the experts read them.
//
// Flags have the number of the call, which lives on the device, so that replays of a graph go on
// with it.
#pragma once

#include <cstdint>

#include "comm/allreduce_args.h"
#include "comm/workspace_layout.h"
#include "narrowfloat/tensor.h"

namespace narrowfloat {

inline constexpr int kMostExchangeRanks = 64;
// In place of the offset of flags: what a kernel reads is there when it starts.
inline constexpr int64_t kNoFlags = -1;

// Memory that this rank reads or writes for each rank.
struct RankPointers {
  uint8_t* at[kMostExchangeRanks] = {};
};

// A row of results: the rank that has it, and its number among those that belong to this rank.
// row < 0: there is none.
struct ReturnedRow {
  int32_t rank = 0;
  int32_t row = -1;
};

// The plan of a call, in memory of the device.
struct ExchangePlan {
  uint32_t* call = nullptr;         // The number of the call; plan_tokens() adds 1.
  uint32_t* tickets = nullptr;      // 0 between launches.
  int32_t* ids = nullptr;           // [tokens, top_k]: places, -1 for ids that name no expert.
  float* weights = nullptr;         // [tokens, top_k]
  int32_t* places = nullptr;        // [tokens, ranks]: number of the row sent there, -1: none.
  int32_t* counts = nullptr;        // [ranks]: rows sent there.
  ReturnedRow* returned = nullptr;  // [tokens, slots]
};

struct PlanTokens {
  const int32_t* ids = nullptr;  // [tokens, top_k]: numbers of experts.
  const float* weights = nullptr;
  const int32_t* place_of_expert = nullptr;  // Null: expert e is at place e.
  int64_t tokens = 0;
  int32_t top_k = 0;
  int32_t experts = 0;
  int32_t num_places = 0;
  int32_t ranks = 1;
  // Results come back one row for each slot, not one for each rank.
  bool is_topk = false;
};
void plan_tokens(const PlanTokens& args, const ExchangePlan& plan, Device device, Stream stream);

// One part of a row: `units` pieces of `unit_bytes`.
struct SentPart {
  const uint8_t* data = nullptr;
  int64_t row_stride = 0;   // In bytes, as the next one.
  int64_t unit_stride = 0;  // unit_bytes where the part is dense.
  int64_t units = 0;
  int32_t unit_bytes = 1;  // 1, 2, 4, 8 or 16; everything is a multiple of it.
  int64_t offset = 0;      // The rows of rank r begin at targets.at[r] + offset.
};
inline constexpr int kMostSentParts = 5;

struct SendTokens {
  SentPart parts[kMostSentParts] = {};
  int32_t num_parts = 0;
  int64_t tokens = 0;
  int32_t ranks = 1;
  RankPointers targets;
  int64_t count_offset = 0;  // The number of rows for rank r, an I32, at targets.at[r].
  int64_t flags_offset = 0;
};
void send_tokens(const SendTokens& args, const ExchangePlan& plan, const RankMemory& memory,
                 Device device, Stream stream);

// Data of one kind that ranks have sent: those of rank r are at `first` + r * stride.
struct SentBlocks {
  const uint8_t* first = nullptr;
  int64_t stride = 0;
};

// One part of the rows, which is copied: the block of rank r to target + r * block_bytes.
struct ReceivedPart {
  SentBlocks sent;
  uint8_t* target = nullptr;
  int64_t block_bytes = 0;
  int64_t row_bytes = 0;
  int32_t unit_bytes = 1;  // As in SentPart.
};
inline constexpr int kMostReceivedParts = 4;

// In this rank's own memory.
struct ReceiveTokens {
  SentBlocks sent_counts;     // An I32 each.
  SentBlocks sent_ids;        // I32 [max_tokens, top_k] each.
  int32_t* counts = nullptr;  // [ranks]; may be where they were sent, as `ids`.
  int32_t* ids = nullptr;     // [ranks, max_tokens, top_k]
  ReceivedPart parts[kMostReceivedParts] = {};
  int32_t num_parts = 0;
  int64_t max_tokens = 0;
  int32_t ranks = 1;
  int32_t top_k = 0;
  int32_t num_places = 0;
  int64_t flags_offset = 0;
  EndOfExchange end_of_exchange;
};
// No row is received of a rank that does not come.
void receive_tokens(const ReceiveTokens& args, const ExchangePlan& plan, const RankMemory& memory,
                    Device device, Stream stream);

// Copies rows of `row_bytes`, a multiple of 16: the row slot_to_row[i] to row i, where it is not
// negative.
struct StoreSlots {
  const uint8_t* rows = nullptr;
  const int32_t* slot_to_row = nullptr;
  uint8_t* target = nullptr;
  int64_t slots = 0;
  int64_t row_bytes = 0;
};
void store_slots(const StoreSlots& args, Device device, Stream stream);

void send_results(int64_t flags_offset, const ExchangePlan& plan, const RankMemory& memory,
                  Device device, Stream stream);

// out[t] = round(fold over s, from +0: a = fma(weight, row of returned[t, s], a)), as combine()
// does.
struct SumResults {
  int64_t tokens = 0;
  int32_t slots = 0;
  bool has_weights = false;  // Those of the plan; else 1.
  DType result_dtype = DType::kBF16;
  int64_t row_bytes = 0;  // A multiple of 16.
  RankPointers results;   // Those that each rank has computed for this one.
  DType out_dtype = DType::kBF16;
  uint8_t* out = nullptr;
  int64_t out_row_bytes = 0;  // A multiple of 16.
  int64_t cols = 0;
  int64_t flags_offset = 0;
  EndOfExchange end_of_exchange;
};
void sum_results(const SumResults& args, const ExchangePlan& plan, const RankMemory& memory,
                 Device device, Stream stream);

// Ends the waits of all ranks with an error.
void abort_exchange(const ExchangePlan& plan, const RankMemory& memory, Device device,
                    Stream stream);

}  // namespace narrowfloat
