#include "tests/cuda_emulated/emulated_kernels.h"

#include <memory>

#include "cuda/copies.cuh"
#include "cuda/kernel_variants.h"
#include "cuda/make_params.h"
#include "cuda/sum_native_types.h"
#include "emulator/kernel_launch.h"

namespace dtcomm::cuda_emulated {

namespace {

using emulator::EmulatedWarp;
using emulator::MemoryObserver;
using BlockLanes = cuda::BlockLanes<EmulatedWarp>;

// What the threads of a block share.
struct Shared {
  std::uint32_t words[cuda::kBlockScratchWords];
  float values[cuda::kSlots];
};

// The arguments of a kernel for `Calls`, one call or a group.
template <class Calls, class Family>
struct Arguments {
  Calls calls;
  Family family;
};
template <class Family>
using GroupArguments = Arguments<cuda::CallGroup, Family>;
using SparseArguments = Arguments<cuda::KernelParams, cuda::Sparse>;

emulator::Scheduler& scheduler() {
  static emulator::Scheduler scheduler(cuda::kMaxBlockThreads);
  return scheduler;
}

template <class Arguments, class Kernel>
void launch(MemoryObserver* observer, unsigned tiles, unsigned threads, const Arguments& arguments, Kernel kernel) {
  emulator::launch_kernel<Shared>(
      scheduler(), observer, tiles, threads, [&](unsigned) -> const Arguments& { return arguments; }, kernel,
      [&](MemoryObserver& reported_missing) { reported_missing.constant(&arguments, sizeof arguments); });
}

// Every element is one thread's: there is nothing for an observer to see.
void combine_native(const Combine& call, const std::uint8_t* const* table) {
  const cuda::NativeSumParams planned = cuda::native_sum_params(call, table);
  cuda::with_native_type(call.dtype, [&](auto zero) {
    for (std::size_t i = 0; i < planned.padded; ++i) cuda::combine_element<decltype(zero)>(planned, i);
  });
}

void sparse_block(const EmulatedWarp& warp, Shared& shared, const SparseArguments& arguments, unsigned tile) {
  const BlockLanes lanes(warp, shared.words);
  const cuda::KernelParams& call = arguments.calls;
  call.payload_out ? cuda::combine_sparse<true>(lanes, call, arguments.family, tile, shared.values)
                   : cuda::combine_sparse<false>(lanes, call, arguments.family, tile, shared.values);
}

template <class Kernel, class Family>
void dense_block(const EmulatedWarp& warp, Shared& shared, const GroupArguments<Family>& arguments, unsigned tile) {
  using K = Kernel;
  if constexpr (Family::kSpecialized) {
    cuda::combine_group_tile<K::kCount, K::kEncodes, K::kFeedback>(warp, arguments.calls, arguments.family, tile);
  } else {
    const BlockLanes lanes(warp, shared.words);
    cuda::combine_group_tile<K::kCount, K::kEncodes, K::kFeedback>(lanes, arguments.calls, arguments.family, tile);
  }
}

void copy(const Combine& call, const void* from, cuda::Group<cuda::Copy>& group) {
  cuda::for_each_copy(call, from,
                      [&](const cuda::Copy& copy) { cuda::add_item(group, copy, cuda::tiles(copy, cuda::kThreads)); });
}

// Every byte is one thread's: there is nothing for an observer to see.
void run_copies(const cuda::Group<cuda::Copy>& group) {
  for (unsigned tile = 0; tile < group.first_tile[group.size]; ++tile) {
    const unsigned item = group.item_of(tile), first = (tile - group.first_tile[item]) * cuda::kThreads;
    for (unsigned i = 0; i < cuda::kThreads; ++i) {
      cuda::copy_part(group.items[item], std::uint64_t{first + i} * cuda::kCopyBytes);
    }
  }
}

}  // namespace

int emulated_barriers() { return scheduler().barriers(); }

void combine_emulated(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                      MemoryObserver* observer, int hidden_barrier) {
  scheduler().hide_barrier(hidden_barrier);
  if (const void* from = cuda::single_verbatim_term(codec, call)) {
    cuda::Group<cuda::Copy> group;
    group.size = 0;
    copy(call, from, group);
    if (group.size > 0) run_copies(group);
  } else if (codec.family == Family::none && cuda::is_native_sum_type(call.dtype)) {
    combine_native(call, table);
  } else if (cuda::is_sparse(codec)) {
    const cuda::KernelParams params = cuda::make_params(codec, call, table, call.payload_out != nullptr);
    const SparseArguments arguments{params, cuda::sparse_family(codec, params)};
    launch(observer, cuda::tiles(params, cuda::kMaxBlockThreads), cuda::kMaxBlockThreads, arguments, sparse_block);
  } else {
    combine_group_emulated(codec, {&call}, {table}, observer);
  }
}

std::size_t combine_group_emulated(const Codec& codec, const std::vector<const Combine*>& calls,
                                   const std::vector<const std::uint8_t* const*>& tables, MemoryObserver* observer) {
  return cuda::with_family(codec, calls[0]->dtype, [&](const auto& family) {
    using F = std::decay_t<decltype(family)>;
    const unsigned threads = F::kSpecialized ? cuda::kThreads : cuda::threads_of(family.group());
    const auto arguments = std::make_unique<GroupArguments<F>>(GroupArguments<F>{{}, family});
    cuda::CallGroup& group = arguments->calls;
    for (std::size_t i = 0; i < calls.size() && group.size < cuda::kMaxGroup; ++i) {
      const bool encodes = calls[i]->payload_out != nullptr;
      const cuda::KernelParams params = cuda::make_params(codec, *calls[i], tables[i], encodes);
      if (group.size > 0 && !cuda::same_kernel(params, group.items[0])) break;
      cuda::add_item(group, params, cuda::tiles(params, cuda::tile_vecs(family)));
    }
    cuda::with_kernel_variant<F>(group.items[0], [&](auto kernel) {
      launch(observer, group.first_tile[group.size], threads, *arguments, dense_block<decltype(kernel), F>);
    });
    return std::size_t{group.size};
  });
}

}  // namespace dtcomm::cuda_emulated
