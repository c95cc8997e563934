// Calls with known results, for tests of the engine with a thread for each rank.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "engine/communicator.h"

namespace dtcomm::tests {

inline constexpr std::size_t kSlotBytes = 16 * 1024;
inline constexpr std::size_t kParallelSlotBytes = 512 * 1024;  // has room for pieces of parallel_call()

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

// Two-shot all-reduce as dtcomm/schedule/lower.py writes it: boxes in the order (step, chunk).
inline std::shared_ptr<const Program> two_shot(int rank, int ranks) {
  const auto box_of = [](int owner, int chunk) { return chunk < owner ? chunk : chunk - 1; };
  std::vector<std::int64_t> flat;
  const auto add = [&](std::int64_t code, int chunk, std::vector<std::int64_t> operands) {
    flat.insert(flat.end(), {code, chunk, static_cast<std::int64_t>(operands.size())});
    flat.insert(flat.end(), operands.begin(), operands.end());
  };
  for (int chunk = 0; chunk < ranks; ++chunk) {
    if (chunk == rank) continue;
    add(1, chunk, {box_of(rank, chunk), 0, 0});
    add(2, chunk, {box_of(rank, chunk), 0, chunk});
  }
  std::vector<std::int64_t> reduce{1, rank, ranks - 1, 1, 0, 1, 0, ranks - 1};
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    add(3, rank, {peer, box_of(peer, rank), 0});
    reduce.insert(reduce.end(), {peer, box_of(peer, rank), 0});
  }
  add(4, rank, reduce);
  std::vector<std::int64_t> send{ranks - 1, 0};
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer != rank) send.push_back(peer);
  }
  add(2, rank, send);
  for (int chunk = 0; chunk < ranks; ++chunk) {
    if (chunk == rank) continue;
    add(3, chunk, {chunk, ranks - 1, 0});
    add(5, chunk, {chunk, ranks - 1, 0});
  }
  return std::make_shared<Program>(
      Program::parse(rank, ranks, ranks, std::vector<int>(static_cast<std::size_t>(ranks), ranks), flat));
}

inline PlanSpec plan_spec(std::shared_ptr<const Program> program, Geometry geometry, const Segment& segment,
                          const std::string& text) {
  PlanSpec spec;
  spec.program = std::move(program);
  spec.geometry = geometry;
  spec.segments = {segment};
  spec.text = text;
  spec.variants.piece_bytes = 8 * 1024;
  spec.slot_bytes = kSlotBytes;
  return spec;
}

// With trials, a tuner tries variants of it; all ranks must then share memory.
inline Call all_reduce_call(int rank, int ranks, std::vector<float>& tensor, const Codec& codec = {},
                            bool trials = false) {
  Segment segment{tensor.size(), DType::f32, codec, codec};
  PlanSpec spec = plan_spec(two_shot(rank, ranks), Geometry::whole, segment, "test");
  if (trials) {
    spec.variants.size_class = "all_reduce";
    spec.variants.piece_sizes = {4 * 1024, spec.variants.piece_bytes, 16 * 1024};
    spec.variants.tries.stream_payload = spec.variants.tries.stream_output = true;
  }
  Call call;
  call.plan = std::make_shared<Plan>(spec);
  auto* data = reinterpret_cast<std::uint8_t*>(tensor.data());
  call.tensors.push_back({data, data, nullptr});
  call.kernels = find_kernels("generic");
  return call;
}

// An all_gather in which every rank copies the others' tensors out of their memory, or through the slots.
inline Call all_gather_call(int rank, int ranks, std::vector<float>& input, std::vector<float>& output,
                            bool single_copy = true, const Codec& codec = {}) {
  std::vector<std::int64_t> flat{1, rank, 3, 0, 1, 0, 2, rank, ranks + 1, 0, 0};
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer != rank) flat.push_back(peer);
  }
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    for (const std::int64_t code : {3, 5}) flat.insert(flat.end(), {code, peer, 3, peer, 0, 0});
  }
  const auto program = std::make_shared<Program>(
      Program::parse(rank, ranks, ranks, std::vector<int>(static_cast<std::size_t>(ranks), 1), flat));
  PlanSpec spec = plan_spec(program, Geometry::gather, {input.size(), DType::f32, codec, codec}, "all_gather");
  spec.variants.single_copy = single_copy;
  Call call;
  call.plan = std::make_shared<Plan>(spec);
  output.assign(input.size() * static_cast<std::size_t>(ranks), -1.0f);
  call.tensors.push_back(
      {reinterpret_cast<std::uint8_t*>(input.data()), reinterpret_cast<std::uint8_t*>(output.data()), nullptr});
  if (single_copy) call.address = reinterpret_cast<std::uintptr_t>(input.data());
  call.kernels = find_kernels("generic");
  return call;
}

// A message of rank 0 to rank 1, which offers its memory.
inline Call message_call(int rank, std::vector<float>& tensor) {
  const std::vector<std::int64_t> flat = rank == 0 ? std::vector<std::int64_t>{1, 0, 3, 0, 0, 0, 2, 0, 3, 0, 0, 1}
                                                   : std::vector<std::int64_t>{3, 0, 3, 0, 0, 0, 5, 0, 3, 0, 0, 0};
  const auto program = std::make_shared<Program>(Program::parse(rank, 2, 1, std::vector<int>{1, 0}, flat));
  PlanSpec spec = plan_spec(program, Geometry::whole, {tensor.size(), DType::f32, {}, {}}, "message");
  spec.variants.single_copy = spec.variants.offers = true;
  Call call;
  call.plan = std::make_shared<Plan>(spec);
  auto* const data = reinterpret_cast<std::uint8_t*>(tensor.data());
  call.tensors.push_back({rank == 0 ? data : nullptr, rank == 0 ? nullptr : data, nullptr});
  if (rank == 0) call.address = reinterpret_cast<std::uintptr_t>(data);
  call.kernels = find_kernels("generic");
  return call;
}

// The call on three threads, in pieces that are shared out.
inline Call parallel_call(Call call) {
  PlanSpec spec = call.plan->spec();
  spec.variants.piece_bytes = 256 * 1024;
  spec.variants.parallel = true;
  spec.variants.threads = 3;
  spec.slot_bytes = kParallelSlotBytes;
  call.plan = std::make_shared<Plan>(spec);
  return call;
}

inline std::vector<float> input(int rank, int operation) {
  std::vector<float> tensor(static_cast<std::size_t>(1 + operation * 997 % 9000));
  for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<float>((i + 1) % 64 * (rank + 1) + operation);
  return tensor;
}

inline void check_all_reduce(const std::vector<float>& tensor, int ranks, int operation) {
  for (std::size_t i = 0; i < tensor.size(); ++i) {
    float expected = 0;
    for (int rank = 0; rank < ranks; ++rank) expected += static_cast<float>((i + 1) % 64 * (rank + 1) + operation);
    if (tensor[i] != expected) fail("operation " + std::to_string(operation) + ", element " + std::to_string(i));
  }
}

inline void check_all_gather(std::vector<float>& tensor, const std::vector<float>& output, int ranks, int operation) {
  std::fill(tensor.begin(), tensor.end(), -2.0f);  // no rank may read it any more
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<float> expected = input(rank, operation);
    if (!std::equal(expected.begin(), expected.end(),
                    output.begin() + static_cast<std::ptrdiff_t>(expected.size()) * rank))
      fail("all_gather, operation " + std::to_string(operation));
  }
}

}  // namespace dtcomm::tests
