#include "tests/cuda_emulated/emulated_kernels.h"

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

// The arguments of a kernel.
template <class Family>
struct Arguments {
  cuda::KernelParams call;
  Family family;
};

emulator::Scheduler& scheduler() {
  static emulator::Scheduler scheduler(cuda::kMaxBlockThreads);
  return scheduler;
}

template <class Family, class Kernel>
void launch(MemoryObserver* observer, unsigned threads, const Arguments<Family>& arguments, Kernel kernel) {
  emulator::launch_kernel<Shared>(
      scheduler(), observer, cuda::tiles(arguments.call, threads), threads,
      [&](unsigned) -> const Arguments<Family>& { return arguments; }, kernel,
      [&](MemoryObserver& reported_missing) { reported_missing.constant(&arguments, sizeof arguments); });
}

// Every element is one thread's: there is nothing for an observer to see.
bool combine_native(const Combine& call, const std::uint8_t* const* table) {
  const cuda::NativeSumParams planned = cuda::native_sum_params(call, table);
  cuda::with_native_type(call.dtype, [&](auto zero) {
    for (std::size_t i = 0; i < planned.padded; ++i) cuda::combine_element<decltype(zero)>(planned, i);
  });
  return true;
}

void sparse_block(const EmulatedWarp& warp, Shared& shared, const Arguments<cuda::Sparse>& arguments, unsigned tile) {
  const BlockLanes lanes(warp, shared.words);
  const cuda::KernelParams& call = arguments.call;
  call.payload_out ? cuda::combine_sparse<true>(lanes, call, arguments.family, tile, shared.values)
                   : cuda::combine_sparse<false>(lanes, call, arguments.family, tile, shared.values);
}

template <class Kernel, class Family>
void dense_block(const EmulatedWarp& warp, Shared& shared, const Arguments<Family>& arguments, unsigned tile) {
  using K = Kernel;
  if constexpr (Family::kSpecialized) {
    cuda::combine_tile<K::kCount, K::kEncodes, K::kFeedback>(warp, arguments.call, arguments.family, tile);
  } else {
    const BlockLanes lanes(warp, shared.words);
    cuda::combine_tile<K::kCount, K::kEncodes, K::kFeedback>(lanes, arguments.call, arguments.family, tile);
  }
}

}  // namespace

int emulated_barriers() { return scheduler().barriers(); }

bool combine_emulated(const Codec& codec, const Combine& call, const std::uint8_t* const* table,
                      MemoryObserver* observer, int hidden_barrier) {
  scheduler().hide_barrier(hidden_barrier);
  if (cuda::single_verbatim_term(codec, call)) return false;
  if (codec.family == Family::none && cuda::is_native_sum_type(call.dtype)) return combine_native(call, table);
  const cuda::KernelParams planned = cuda::make_params(codec, call, table, call.payload_out != nullptr);
  if (cuda::is_sparse(codec)) {
    const Arguments<cuda::Sparse> arguments{planned, cuda::sparse_family(codec, planned)};
    launch(observer, cuda::kMaxBlockThreads, arguments, sparse_block);
    return true;
  }
  cuda::with_family(codec, call.dtype, [&](const auto& family) {
    using F = std::decay_t<decltype(family)>;
    const Arguments<F> arguments{planned, family};
    const unsigned threads = F::kSpecialized ? cuda::kThreads : cuda::threads_of(family.group());
    cuda::with_kernel_variant<F>(
        planned, [&](auto kernel) { launch(observer, threads, arguments, dense_block<decltype(kernel), F>); });
  });
  return true;
}

}  // namespace dtcomm::cuda_emulated
