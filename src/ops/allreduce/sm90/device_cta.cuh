// The Cta of comm/protocol.h on a GPU. A launch has the grid of one rank, or of all virtual ranks
// one after another.
#pragma once

#include "comm/protocol.h"
#include "device/ptx/cluster.cuh"
#include "device/ptx/grid_dependency.cuh"
#include "device/ptx/system_memory.cuh"
#include "device/reduce.cuh"

namespace narrowfloat {

class DeviceCta {
 public:
  // first_cta: the first CTA of this rank's grid, a multiple of the cluster size. leaves: of a row.
  __device__ DeviceCta(uint32_t first_cta, int num_ctas, int leaves, bool triggers_after_push)
      : index_(static_cast<int>(blockIdx.x - first_cta)),
        num_ctas_(num_ctas),
        triggers_after_push_(triggers_after_push),
        log2_cluster_(log2_of_cluster(cluster_size())),
        rank_in_cluster_(static_cast<int>(cluster_rank())),
        num_steps_((leaves + leaves_of_step() - 1) / leaves_of_step()) {}

  static constexpr int kMostCtas = narrowfloat::kMostCtas;
  bool aborted = false;

  [[nodiscard]] __device__ int index() const { return index_; }
  [[nodiscard]] __device__ int num_ctas() const { return num_ctas_; }
  [[nodiscard]] __device__ int cluster() const { return index_ >> log2_cluster_; }
  [[nodiscard]] __device__ int num_clusters() const { return num_ctas_ >> log2_cluster_; }
  // CTAs of a cluster, and this one's number there.
  [[nodiscard]] __device__ int cluster_ctas() const { return 1 << log2_cluster_; }
  [[nodiscard]] __device__ int rank_in_cluster() const { return rank_in_cluster_; }
  [[nodiscard]] __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] __device__ int num_threads() const { return static_cast<int>(blockDim.x); }
  [[nodiscard]] __device__ bool is_leader() const { return threadIdx.x == 0; }
  __device__ void sync() const { __syncthreads(); }

  // A row is taken in steps: in each, the threads of the cluster take neighbouring leaves. All
  // warps take the same number of steps.
  [[nodiscard]] __device__ int num_steps() const { return num_steps_; }
  // The step that for_each_leaf() is in.
  [[nodiscard]] __device__ int step() const { return step_; }
  // The first leaf of this CTA in a step.
  [[nodiscard]] __device__ int first_leaf(int step) const {
    return step * leaves_of_step() + rank_in_cluster_ * num_threads();
  }
  template <class Function>
  __device__ void for_each_leaf(int64_t leaves, Function&& function) {
    int leaf = first_leaf(0) + thread();
#pragma unroll 1
    for (step_ = 0; step_ < num_steps_; ++step_) {
      function(int64_t{leaf}, leaf < static_cast<int>(leaves));
      leaf += leaves_of_step();
    }
  }
  template <class Function>
  __device__ void for_each_cell(int64_t count, Function&& function) const {
    const int64_t step = int64_t{num_ctas_} * num_threads();
#pragma unroll 1
    for (int64_t i = int64_t{index_} * num_threads() + thread(); i < count; i += step) function(i);
  }

  template <class LeafType>
  __device__ static void send(LeafType* to, const LeafType& leaf) {
    NF_UNROLL
    for (int i = 0; i < LeafType::kWords; i += 4) {
      store_relaxed_16(to->words + i,
                       {leaf.words[i], leaf.words[i + 1], leaf.words[i + 2], leaf.words[i + 3]});
    }
  }
  template <class LeafType>
  __device__ static LeafType poll(const LeafType* from) {
    LeafType leaf;
    NF_UNROLL
    for (int i = 0; i < LeafType::kWords; i += 4) {
      const uint4 words = load_relaxed_16(from->words + i);
      leaf.words[i] = words.x;
      leaf.words[i + 1] = words.y;
      leaf.words[i + 2] = words.z;
      leaf.words[i + 3] = words.w;
    }
    return leaf;
  }
  __device__ static uint32_t load_relaxed(const uint32_t* address) {
    return narrowfloat::load_relaxed(address);
  }
  __device__ static void store_release(uint32_t* address, uint32_t value) {
    narrowfloat::store_release(address, value);
  }
  __device__ static void fence() { fence_system(); }
  // The end of the grid does it, for all memory of the system; a grid that is launched early waits
  // for it before its first access.
  __device__ static void end_call() {}
  __device__ static bool claim(uint32_t* address) { return swap_if_equal_gpu(address, 0, 1) == 0; }
  __device__ static uint64_t now_ns() { return global_time_ns(); }
  // Polling has no back-off: it would add to the latency, and nothing else runs on the SM.
  __device__ static void pause(uint32_t /*spins*/) {}
  __device__ static void reached(ProtocolPoint /*point*/) {}
  __device__ void after_push() const {
    if (triggers_after_push_) trigger_dependent_launch();
  }

 private:
  // Clusters have 1, 2, 4 or 8 CTAs.
  __device__ static int log2_of_cluster(uint32_t ctas) {
    return (ctas >= 2 ? 1 : 0) + (ctas >= 4 ? 1 : 0) + (ctas >= 8 ? 1 : 0);
  }
  [[nodiscard]] __device__ int leaves_of_step() const { return num_threads() << log2_cluster_; }

  int index_;
  int num_ctas_;
  bool triggers_after_push_;
  int log2_cluster_;
  int rank_in_cluster_;
  int num_steps_;
  int step_ = 0;
};

}  // namespace narrowfloat
