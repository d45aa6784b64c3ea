// See cuda_expert_rank.h.
#include "layers/expert_parallel/cuda_expert_rank.h"

#include <array>
#include <atomic>
#include <exception>
#include <utility>

#include "base/int_math.h"
#include "base/throw_error.h"
#include "layers/expert_parallel/expert_exchange.h"
#include "ops/allreduce/allreduce_sm90.h"
#include "runtime/cuda/device_memory.h"

namespace narrowfloat {
namespace {

// The most bytes, up to 16, of which all numbers are multiples.
int32_t largest_unit(std::initializer_list<int64_t> numbers) {
  int32_t unit = 16;
  for (const int64_t number : numbers) {
    while (number % unit != 0) unit /= 2;
  }
  return unit;
}

int64_t address_of(const void* data) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16);
}

}  // namespace

CudaExpertRank::CudaExpertRank(const ExpertParallelConfig& config, const ExpertLayout& layout,
                               int rank, Device device, std::unique_ptr<CudaExchange> exchange,
                               std::chrono::milliseconds deadline)
    : Impl(config, layout, rank, device),
      exchange_(std::move(exchange)),
      deadline_(deadline),
      fault_(allocate_mapped_memory(device, sizeof(AllReduceFault))),
      control_(allocate_device_memory(device, sizeof(LocalControl))) {
  exchange_->describe(view_);
  view_.control = reinterpret_cast<LocalControl*>(control_.get());
  view_.fault = reinterpret_cast<AllReduceFault*>(fault_.get());
  view_.layout.abort = layout.abort;
  view_.deadline_ns = nanoseconds_of(deadline);
  allocate_plan();
  if (!place_of_expert().empty()) {
    const auto bytes = static_cast<int64_t>(place_of_expert().size() * sizeof(int32_t));
    places_ = allocate_device_memory(device, bytes);
    copy_to_device(places_.get(), place_of_expert().data(), bytes, device, {});
  }
  // Flags and abort cell; the number of the call and the tickets; the claim of a fault.
  fill_words(exchange_->own(), layout.place(ExpertPart::kCounts).offset / 4, 0, device, {});
  fill_words(plan_memory_.get(), plan_bytes_ / 4, 0, device, {});
  fill_words(control_.get(), int64_t{sizeof(LocalControl)} / 4, 0, device, {});
  wait_for_device(device);
}

void CudaExpertRank::allocate_plan() {
  const int64_t tokens = config().max_tokens;
  const int64_t ranks = layout().ranks;
  const int64_t top_k = config().top_k;
  const std::array<int64_t, 7> sizes{
      int64_t{sizeof(uint32_t)},
      int64_t{sizeof(uint32_t)},
      tokens * top_k * int64_t{sizeof(int32_t)},
      tokens * top_k * int64_t{sizeof(float)},
      tokens * ranks * int64_t{sizeof(int32_t)},
      ranks * int64_t{sizeof(int32_t)},
      tokens * (is_topk() ? top_k : ranks) * int64_t{sizeof(ReturnedRow)}};
  std::array<int64_t, 7> offsets{};
  for (size_t part = 0; part < sizes.size(); ++part) {
    offsets[part] = plan_bytes_;
    plan_bytes_ += round_up(sizes[part], kWorkspaceAlignment);
  }
  plan_memory_ = allocate_device_memory(device(), plan_bytes_);
  const auto at = [&](size_t part) { return plan_memory_.get() + offsets[part]; };
  plan_.call = reinterpret_cast<uint32_t*>(at(0));
  plan_.tickets = reinterpret_cast<uint32_t*>(at(1));
  plan_.ids = reinterpret_cast<int32_t*>(at(2));
  plan_.weights = reinterpret_cast<float*>(at(3));
  plan_.places = reinterpret_cast<int32_t*>(at(4));
  plan_.counts = reinterpret_cast<int32_t*>(at(5));
  plan_.returned = reinterpret_cast<ReturnedRow*>(at(6));
}

int64_t CudaExpertRank::memory_bytes() const {
  const auto places = static_cast<int64_t>(place_of_expert().size() * sizeof(int32_t));
  return exchange_->memory_bytes() + payload().bytes() + plan_bytes_ + places +
         int64_t{sizeof(LocalControl)} + int64_t{sizeof(AllReduceFault)};
}

void CudaExpertRank::check_exchange() const {
  exchange_->check();
  AllReduceFault& fault = *view_.fault;
  const uint32_t kind = std::atomic_ref(fault.kind).load(std::memory_order_acquire);
  if (kind == AllReduceFault::kNone) return;
  // See fault_number() of exchange_cta.cuh.
  const uint32_t call = fault.epoch / 2;
  const std::string_view awaited = fault.epoch % 2 == 0 ? "tokens" : "results";
  std::string reason = "a rank gave up";
  if (kind == AllReduceFault::kBarrierWait) {
    reason = fmt::format("rank {} sent no {} within {} ms", fault.peer, awaited, deadline_.count());
  } else if (kind == AllReduceFault::kBadIndex) {
    reason = fmt::format("rank {} sent a count of {} tokens, of at most {}", fault.peer,
                         static_cast<int32_t>(fault.detail), config().max_tokens);
  }
  throw_error(ErrorKind::kDevice,
              "expert parallelism: call {} failed on rank {} of {}: {}; make a new ExpertParallel "
              "on all ranks, or end the job",
              call, rank(), layout().ranks, reason);
}

void CudaExpertRank::tell_peers_to_give_up(Stream stream) {
  if (!exchange_->give_up()) abort_exchange(plan_, view_, device(), stream);
}

void CudaExpertRank::disconnect() {
  if (!exchange_->has_other_processes()) return;
  // Calls only queue kernels, which use the memory of peers. A rank whose GPU failed still meets
  // the others.
  std::exception_ptr error;
  try {
    wait_for_device(device());
  } catch (...) {
    error = std::current_exception();
  }
  exchange_->disconnect();
  if (error) std::rethrow_exception(error);
}

std::byte* CudaExpertRank::received(ExpertPart part) const {
  return reinterpret_cast<std::byte*>(exchange_->own() + layout().place(part).offset);
}

void CudaExpertRank::add_part(SendTokens& args, ExpertPart part, const TensorView& rows) const {
  const int64_t row_bytes = layout().place(part).row_bytes;
  if (row_bytes == 0) return;
  const int64_t offset = exchange_->outgoing_offset(part);
  const int32_t unit = largest_unit({address_of(rows.data), row_bytes, offset});
  args.parts[args.num_parts++] = {.data = static_cast<const uint8_t*>(rows.data),
                                  .row_stride = row_bytes,
                                  .unit_stride = unit,
                                  .units = row_bytes / unit,
                                  .unit_bytes = unit,
                                  .offset = offset};
}

void CudaExpertRank::add_scales(SendTokens& args, const TensorView& scales) const {
  if (layout().place(ExpertPart::kScales).row_bytes == 0) return;
  const int64_t element = bits(scales.dtype) / 8;
  const int64_t blocks = scales.shape[1];
  const bool is_dense = (blocks == 1 || scales.strides[1] == 1) &&
                        (scales.shape[0] <= 1 || scales.strides[0] == blocks);
  if (is_dense) return add_part(args, ExpertPart::kScales, scales);
  args.parts[args.num_parts++] = {.data = static_cast<const uint8_t*>(scales.data),
                                  .row_stride = scales.strides[0] * element,
                                  .unit_stride = scales.strides[1] * element,
                                  .units = blocks,
                                  .unit_bytes = static_cast<int32_t>(element),
                                  .offset = exchange_->outgoing_offset(ExpertPart::kScales)};
}

void CudaExpertRank::send_tokens(const CodedRows& rows, const TensorView& ids,
                                 const TensorView& weights, Stream stream) {
  // The plan comes first: it counts the call, which an error of what follows names.
  narrowfloat::plan_tokens({.ids = static_cast<const int32_t*>(ids.data),
                            .weights = static_cast<const float*>(weights.data),
                            .place_of_expert = reinterpret_cast<const int32_t*>(places_.get()),
                            .tokens = ids.shape[0],
                            .top_k = config().top_k,
                            .experts = config().experts,
                            .num_places = num_places(),
                            .ranks = layout().ranks,
                            .is_topk = is_topk()},
                           plan_, device(), stream);
  const CodedRows coded = payload().quantize(rows, stream);
  SendTokens args;
  args.tokens = ids.shape[0];
  args.ranks = layout().ranks;
  args.targets = exchange_->outgoing();
  args.count_offset = exchange_->outgoing_offset(ExpertPart::kCounts);
  args.flags_offset = exchange_->token_flags();
  add_part(args, ExpertPart::kValues, coded.values);
  add_scales(args, coded.scales);
  add_part(args, ExpertPart::kRowScale, coded.row_scale);
  add_part(args, ExpertPart::kIds, TensorView::contiguous(plan_.ids, DType::kI32, {ids.shape[0]}));
  add_part(args, ExpertPart::kWeights, weights);
  narrowfloat::send_tokens(args, plan_, view_, device(), stream);
  exchange_->start_tokens(stream);
}

EndOfExchange CudaExpertRank::finish_exchange(Stream& stream) const {
  const EndOfExchange end = exchange_->finish(stream);
  // Blocks are moved on another stream: the next kernel cannot start before they are here.
  if (!exchange_->arrives_in_place()) stream.programmatic_launch = false;
  return end;
}

void CudaExpertRank::receive_tokens(Stream stream) {
  ReceiveTokens args;
  args.sent_counts = exchange_->incoming(ExpertPart::kCounts);
  args.sent_ids = exchange_->incoming(ExpertPart::kIds);
  args.counts = reinterpret_cast<int32_t*>(received(ExpertPart::kCounts));
  args.ids = reinterpret_cast<int32_t*>(received(ExpertPart::kIds));
  args.max_tokens = config().max_tokens;
  args.ranks = layout().ranks;
  args.top_k = config().top_k;
  args.num_places = num_places();
  args.flags_offset = exchange_->token_flags();
  for (const ExpertPart part :
       {ExpertPart::kValues, ExpertPart::kScales, ExpertPart::kRowScale, ExpertPart::kWeights}) {
    const ExpertLayout::Place& place = layout().place(part);
    if (exchange_->arrives_in_place() || place.row_bytes == 0) continue;
    args.parts[args.num_parts++] = {.sent = exchange_->incoming(part),
                                    .target = reinterpret_cast<uint8_t*>(received(part)),
                                    .block_bytes = place.block_bytes,
                                    .row_bytes = place.row_bytes,
                                    .unit_bytes = largest_unit({place.row_bytes})};
  }
  args.end_of_exchange = finish_exchange(stream);
  narrowfloat::receive_tokens(args, plan_, view_, device(), stream);
}

void CudaExpertRank::send_results(Stream stream) {
  if (exchange_->result_flags() != kNoFlags) {
    narrowfloat::send_results(exchange_->result_flags(), plan_, view_, device(), stream);
  }
  exchange_->start_results(stream);
}

void CudaExpertRank::sum_results(const TensorView& out, Stream stream) {
  SumResults args;
  args.tokens = out.shape[0];
  args.slots = is_topk() ? config().top_k : layout().ranks;
  args.has_weights = is_topk();
  args.result_dtype = config().result_dtype;
  args.row_bytes = result_row_bytes();
  args.results = exchange_->returned();
  args.out_dtype = out.dtype;
  args.out = static_cast<uint8_t*>(out.data);
  args.out_row_bytes = out.strides[0] * bits(out.dtype) / 8;
  args.cols = out.shape[1];
  args.flags_offset = exchange_->result_flags();
  args.end_of_exchange = finish_exchange(stream);
  narrowfloat::sum_results(args, plan_, view_, device(), stream);
}

void CudaExpertRank::store_slots(const std::byte* rows, const int32_t* slot_to_row, int64_t slots,
                                 Stream stream) const {
  narrowfloat::store_slots({.rows = reinterpret_cast<const uint8_t*>(rows),
                            .slot_to_row = slot_to_row,
                            .target = reinterpret_cast<uint8_t*>(own_results()),
                            .slots = slots,
                            .row_bytes = result_row_bytes()},
                           device(), stream);
}

}  // namespace narrowfloat
