#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "tests/device/device.h"

#include "cuda/choose.h"
#include "cuda/exact.h"
#include "cuda/plan.h"
#include "tests/device/fibers.h"

namespace dtcomm::device_tests {

bool combine_on_fibers(const Codec& codec, const Combine& call, const std::uint8_t* const* table) {
  static cuda::Fibers fibers;
  if (cuda::verbatim(codec, call)) return false;
  if (codec.family == Family::none && cuda::exact_type(call.dtype)) {
    const cuda::ExactCall planned = cuda::exact_call(call, table);
    cuda::with_exact(call.dtype, [&](auto zero) {
      for (std::size_t i = 0; i < planned.padded; ++i) cuda::combine_element<decltype(zero)>(planned, i);
    });
    return true;
  }
  const cuda::Call planned = cuda::plan(codec, call, table);
  if (cuda::is_sparse(codec)) {
    const cuda::Sparse family = cuda::sparse_family(codec, planned);
    static float room[cuda::kSlots];
    for (unsigned tile = 0; tile < cuda::tiles(planned, cuda::kMostThreads); ++tile) {
      fibers.run(cuda::kMostThreads, [&](unsigned) {
        const cuda::HostLanes lanes{fibers};
        call.payload_out ? cuda::combine_sparse<true>(lanes, planned, family, tile, room)
                         : cuda::combine_sparse<false>(lanes, planned, family, tile, room);
      });
    }
    return true;
  }
  cuda::with_family(codec, call.dtype, [&](const auto& family) {
    using F = std::decay_t<decltype(family)>;
    const unsigned threads = F::kHot ? cuda::kThreads : cuda::threads_of(family.group());
    cuda::choose<F>(planned, [&](auto kernel) {
      using K = decltype(kernel);
      for (unsigned tile = 0; tile < cuda::tiles(planned, threads); ++tile) {
        fibers.run(threads, [&](unsigned) {
          cuda::combine_tile<K::kCount, K::kEncodes, K::kFeedback>(cuda::HostLanes{fibers}, planned, family, tile);
        });
      }
    });
  });
  return true;
}

}  // namespace dtcomm::device_tests
