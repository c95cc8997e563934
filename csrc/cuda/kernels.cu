#include "cuda/kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "cuda/copies.cuh"
#include "cuda/kernel_variants.h"
#include "cuda/launch_status.h"
#include "cuda/make_params.h"
#include "cuda/sum_native_types.h"

namespace dtcomm::cuda {

namespace {

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Group<Copy> copies) {
  const unsigned item = copies.item_of(blockIdx.x), tile = blockIdx.x - copies.first_tile[item];
  copy_part(copies.items[item], (static_cast<std::uint64_t>(tile) * kThreads + threadIdx.x) * kCopyBytes);
}

// Calls queue(group) for each kMaxGroup of the items.
template <class Item, class Queue>
Status queue_groups(const std::vector<Item>& items, unsigned threads, const Queue& queue) {
  Group<Item> group;
  for (std::size_t begin = 0; begin < items.size(); begin += kMaxGroup) {
    group.size = 0;
    for (std::size_t i = begin; i < std::min(items.size(), begin + kMaxGroup); ++i) {
      add_item(group, items[i], tiles(items[i], threads));
    }
    if (Status status = queue(group); !status.ok()) return status;
  }
  return Status();
}

// Queues calls that a family serves, with one launch for all that the same kernel serves.
template <class Family>
Status queue_dense(std::vector<KernelParams> calls, const Family& family, void* stream) {
  const unsigned vecs = tile_vecs(family);
  while (!calls.empty()) {
    const KernelParams first = calls.front();
    const auto others = std::stable_partition(calls.begin(), calls.end(),
                                              [&](const KernelParams& call) { return same_kernel(call, first); });
    const std::vector<KernelParams> alike(calls.begin(), others);
    calls.erase(calls.begin(), others);
    const Status status =
        queue_groups(alike, vecs, [&](const CallGroup& group) { return launch(group, family, stream); });
    if (!status.ok()) return status;
  }
  return Status();
}

}  // namespace

Status combine_all(const Codec& codec, const Combine* calls, std::size_t count, const std::uint8_t* const* table,
                   void* stream) {
  (void)cudaGetLastError();  // an earlier, unrelated error is not this call's
  const auto queue = static_cast<cudaStream_t>(stream);
  std::vector<Copy> copies;
  std::vector<KernelParams> dense;
  for (const Combine* call = calls; call < calls + count; ++call) {
    if (call->numel == 0) continue;
    if (const void* from = single_verbatim_term(codec, *call)) {
      for_each_copy(*call, from, [&](const Copy& copy) { copies.push_back(copy); });
    } else if (codec.family == Family::none && is_native_sum_type(call->dtype)) {
      if (Status status = combine_native(*call, table, stream); !status.ok()) return status;
    } else {
      const KernelParams params = make_params(codec, *call, table, call->payload_out != nullptr);
      if (is_sparse(codec)) {
        if (Status status = launch(params, sparse_family(codec, params), stream); !status.ok()) return status;
      } else {
        dense.push_back(params);
      }
    }
  }
  const Status copied = queue_groups(copies, kThreads, [&](const Group<Copy>& group) {
    copy_kernel<<<group.first_tile[group.size], kThreads, 0, queue>>>(group);
    return launch_status();
  });
  if (!copied.ok() || dense.empty()) return copied;
  return with_family(codec, calls->dtype,
                     [&](const auto& family) { return queue_dense(std::move(dense), family, stream); });
}

Status combine(const Codec& codec, const Combine& call, const std::uint8_t* const* table, void* stream) {
  return combine_all(codec, &call, 1, table, stream);
}

Status decode(const Codec& codec, const std::uint8_t* payload, std::size_t numel, DType dtype, void* out,
              DType out_dtype, void* stream) {
  Combine call;  // a sum of one term
  call.payloads = &payload;
  call.count = 1;
  call.numel = numel;
  call.out = out;
  call.dtype = dtype;
  call.out_dtype = out_dtype;
  return combine(codec, call, nullptr, stream);
}

}  // namespace dtcomm::cuda
