// The all-reduce on the CPU. cpu_oneshot and cpu_twoshot run the protocols' shared text with one
// thread as the only CTA of a rank. cpu_reference is the oracle: it takes the peers' addends from
// their staging areas and sums all tokens itself, in plain loops.
#include "base/bad_enumerator.h"
#include "comm/twoshot.h"
#include "ops/allreduce/allreduce_problem.h"
#include "ops/allreduce/cpu_cta.h"
#include "ops/allreduce/cpu_row.h"

namespace narrowfloat {
namespace {

template <class Visitor>
void visit_elements(DType element, Visitor&& visitor) {
  switch (element) {
    case DType::kF16:
      return visitor.template operator()<HostElements<DType::kF16>>();
    case DType::kBF16:
      return visitor.template operator()<HostElements<DType::kBF16>>();
    case DType::kF32:
      return visitor.template operator()<HostElements<DType::kF32>>();
    default:
      throw_bad_enumerator("element type", static_cast<int>(element));
  }
}

RowExtents extents_of(const RankArgs& args) {
  return {args.epilogue.tokens, args.epilogue.hidden / kLeafElements};
}

// Calls run.operator()<Elements>(cta, row) for every CTA of the rank; one rank runs the epilogue
// alone.
template <class Run>
void run_on_cpu(const AllReduceCall& call, const RankArgs& args, const Run& run) {
  visit_elements(call.problem.element, [&]<class Elements>() {
    run_cpu_ctas(args.memory.rank, [&](CpuCta& cta) {
      CpuRow<Elements, CpuCta> row(args, cta);
      if (args.memory.ranks == 1) {
        single_rank_allreduce<Elements>(cta, extents_of(args), row);
      } else {
        run.template operator()<Elements>(cta, row);
      }
    });
  });
}

void run_oneshot(const AllReduceCall& call, const RankArgs& args,
                 const AllReduceEngines& /*engines*/, AllReduceTrigger /*trigger*/,
                 Stream /*stream*/) {
  run_on_cpu(call, args, [&]<class Elements>(CpuCta& cta, CpuRow<Elements, CpuCta>& row) {
    oneshot_allreduce<kMaxRanks, Elements>(cta, args.memory, extents_of(args), args.accumulation,
                                           row);
  });
}

void run_twoshot(const AllReduceCall& call, const RankArgs& args,
                 const AllReduceEngines& /*engines*/, AllReduceTrigger /*trigger*/,
                 Stream /*stream*/) {
  run_on_cpu(call, args, [&]<class Elements>(CpuCta& cta, CpuRow<Elements, CpuCta>& row) {
    twoshot_allreduce<kMaxRanks, Elements>(cta, args.memory, extents_of(args), args.accumulation,
                                           row);
  });
}

// The sum of one leaf over the staging areas.
template <class Elements>
typename Elements::LeafType sum_of_staged(const RankArgs& args, int64_t index) {
  float sum[kLeafElements] = {};
  for (int rank = 0; rank < args.memory.ranks; ++rank) {
    float x[kLeafElements];
    Elements::widen(Elements::load(args.memory.regions[rank] + args.memory.layout.staging, index),
                    x);
    for (int i = 0; i < kLeafElements; ++i) {
      sum[i] = rank == 0 ? x[i] : add_rn(sum[i], x[i]);
      if (args.accumulation == AllReduceAccumulation::kElement) sum[i] = Elements::round(sum[i]);
    }
  }
  return Elements::narrow(sum);
}

inline constexpr uint32_t kReferenceBarriers = 3;

// Stages as the two-shot does, in its first area, and leaves that as it was.
template <class Elements>
void reference_allreduce(const RankArgs& args, CpuCta& cta, CpuRow<Elements, CpuCta>& row) {
  const RankMemory& memory = args.memory;
  const RowExtents extents = extents_of(args);
  const uint32_t epoch = cta.load_relaxed(&memory.control->barriers[cta.index()].epoch);
  heed_abort(cta, memory, enter_call(cta, memory));
  auto* const staged = reinterpret_cast<typename Elements::LeafType*>(memory.regions[memory.rank] +
                                                                      memory.layout.staging);
  for (int64_t token = cta.index(); token < extents.tokens; token += cta.num_ctas()) {
    for (int64_t leaf = 0; leaf < extents.leaves; ++leaf) {
      // Atomic words, as those that peers sent there in an earlier two-shot.
      cta.send(staged + token * extents.leaves + leaf,
               without_negative_zeros(row.local_value(token, leaf)));
    }
  }
  cta.reached(ProtocolPoint::kStaged);
  barrier_over_ranks(cta, memory, epoch + 1);
  cta.reached(ProtocolPoint::kFirstBarrier);
  for (int64_t token = cta.index(); token < extents.tokens; token += cta.num_ctas()) {
    for (int64_t leaf = 0; leaf < extents.leaves; ++leaf) {
      typename Elements::LeafType sum{};
      // After a barrier that failed, other ranks may still write to their staging areas.
      if (!cta.aborted) sum = sum_of_staged<Elements>(args, token * extents.leaves + leaf);
      row.accept(token, leaf, true, sum);
    }
    row.finish(token);
  }
  cta.reached(ProtocolPoint::kReduced);
  barrier_over_ranks(cta, memory, epoch + 2);
  cta.reached(ProtocolPoint::kSecondBarrier);
  for (int64_t token = cta.index(); token < extents.tokens; token += cta.num_ctas()) {
    for (int64_t leaf = 0; leaf < extents.leaves; ++leaf) {
      if (cta.aborted) continue;
      cta.send(staged + token * extents.leaves + leaf, leaf_of_sentinels<Elements::kBytes>());
    }
  }
  // The next call of another rank may store there.
  barrier_over_ranks(cta, memory, epoch + kReferenceBarriers);
  leave_call(cta, memory.control->barriers, {.epoch = epoch + kReferenceBarriers});
}

void run_reference(const AllReduceCall& call, const RankArgs& args,
                   const AllReduceEngines& /*engines*/, AllReduceTrigger /*trigger*/,
                   Stream /*stream*/) {
  run_on_cpu(call, args, [&]<class Elements>(CpuCta& cta, CpuRow<Elements, CpuCta>& row) {
    reference_allreduce<Elements>(args, cta, row);
  });
}

Support runs_here(const AllReduceCall& call, AllReduceAlgorithm algorithm) {
  const Support support = cpu_only(call.device);
  return support.ok() ? algorithm_condition(call, algorithm) : support;
}

Support supports_oneshot(const AllReduceCall& call) {
  const Support support = runs_here(call, AllReduceAlgorithm::kOneShot);
  return support.ok() ? oneshot_condition(call) : support;
}

Support supports_twoshot(const AllReduceCall& call) {
  const Support support = runs_here(call, AllReduceAlgorithm::kTwoShot);
  return support.ok() ? twoshot_condition(call) : support;
}

// The reference stages as the two-shot does.
Support supports_reference(const AllReduceCall& call) {
  const Support support = runs_here(call, AllReduceAlgorithm::kReference);
  return support.ok() ? twoshot_condition(call) : support;
}

}  // namespace

const AllReduceImpl kAllReduceCpuOneShot{"cpu_oneshot", AllReduceAlgorithm::kOneShot,
                                         supports_oneshot, run_oneshot, nullptr};
const AllReduceImpl kAllReduceCpuTwoShot{"cpu_twoshot", AllReduceAlgorithm::kTwoShot,
                                         supports_twoshot, run_twoshot, nullptr};
const AllReduceImpl kAllReduceCpuReference{"cpu_reference", AllReduceAlgorithm::kReference,
                                           supports_reference, run_reference, nullptr};

}  // namespace narrowfloat
