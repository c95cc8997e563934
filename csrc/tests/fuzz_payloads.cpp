// Fuzzes the kernels with payloads that no encoder wrote, for every codec family, option and kernel of this CPU: random
// bytes, encodings with flipped bits, constants. No byte outside the buffers may be touched, and all kernels must give
// the same floats, payloads and residuals. Payloads that validation rejects (codec/validate.h) are decoded like the
// others.
//
//   fuzz_payloads_test [--seconds S] [--payloads N] [--seed X] [--family NAME]
//
// Ends at whichever limit comes first, or after 5 seconds if neither is given. The same seed tries the same payloads.
// Prints how many payloads of each family were decoded, and how many of them validation rejects.
#include <chrono>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "codec/layout.h"
#include "codec/lossless.h"
#include "codec/validate.h"
#include "cpu/kernels.h"
#include "tests/fuzz_payloads.h"
#include "tests/guard_pages.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::tests;

constexpr std::size_t kBufferBytes = kMostElements * 8 + 4096;
constexpr std::size_t kMostPayloads = 3;

struct Buffers {
  GuardedBuffer payloads[kMostPayloads]{GuardedBuffer(kBufferBytes), GuardedBuffer(kBufferBytes),
                                        GuardedBuffer(kBufferBytes)};
  GuardedBuffer local{kBufferBytes}, residual{kBufferBytes}, wire{kBufferBytes}, out{kBufferBytes};
};
using Bytes = std::vector<std::uint8_t>;

[[noreturn]] void fail(const Case& at, const char* kernel, const char* what) {
  std::uint8_t raw[sizeof(Codec)];
  std::memcpy(raw, &at.codec, sizeof raw);
  std::fprintf(stderr, "FAILED: %s: %s; codec ", kernel, what);
  for (const std::uint8_t byte : raw) std::fprintf(stderr, "%02x", byte);
  std::fprintf(stderr, " numel %zu dtype %d count %zu local %d residual %d encode %d stream %d\n", at.numel,
               static_cast<int>(at.dtype), at.count, at.local, at.residual, at.encode, at.stream);
  std::exit(1);
}

// The case that runs, for the report when a guard page is touched. Sanitizers report more, so their handler stays.
Case running;

void watch_guard_pages() {
#if !defined(__SANITIZE_ADDRESS__)
  const auto handler = [](int) { fail(running, "a kernel", "a byte outside of the buffers was touched"); };
  std::signal(SIGSEGV, handler);
  std::signal(SIGBUS, handler);
#endif
}

void keep(Bytes& outcome, const std::uint8_t* from, std::size_t size) {
  outcome.insert(outcome.end(), from, from + size);
}

Bytes decode_with(const Kernels& kernels, const Case& at, const std::uint8_t* payload, Buffers& buffers, bool end) {
  Bytes outcome;
  const std::size_t size = at.numel * size_of(at.dtype);
  std::uint8_t* out = buffers.out.place(size, end);
  kernels.decode(at.codec, payload, at.numel, at.dtype, out, at.dtype, at.stream);
  keep(outcome, out, size);
  if (!buffers.out.intact()) fail(at, kernels.name, "decode wrote beside its output");
  return outcome;
}

Bytes combine_with(const Kernels& kernels, const Case& at, const std::vector<const std::uint8_t*>& payloads,
                   const std::vector<std::uint8_t>& old, Buffers& buffers, const std::uint8_t* local, bool end) {
  Bytes outcome;
  const std::size_t size = at.numel * size_of(at.dtype), wire = wire_bytes(at.codec, at.numel, at.dtype);
  Combine call;
  call.payloads = payloads.data();
  call.count = static_cast<int>(payloads.size());
  call.position = static_cast<int>(at.position);
  call.local = at.local ? local : nullptr;
  call.local_dtype = at.dtype;
  call.numel = at.numel;
  call.divisor = at.divisor;
  call.key = at.key;
  call.offset = at.offset;
  call.dtype = call.out_dtype = at.dtype;
  call.stream_payload = call.stream_out = at.stream;
  std::uint8_t* out = buffers.out.place(size, end);
  std::uint8_t* payload = buffers.wire.place(wire, !end);
  std::uint8_t* residual = buffers.residual.place(at.numel * sizeof(float), end);
  std::memcpy(residual, old.data(), at.numel * sizeof(float));
  call.out = out;
  if (at.encode) call.payload_out = payload;
  if (at.residual) {
    call.residual_in = reinterpret_cast<const float*>(residual);
    call.residual_out = reinterpret_cast<float*>(residual);
  }
  kernels.combine(at.codec, call);
  keep(outcome, out, size);
  if (at.encode) keep(outcome, payload, wire);
  if (at.residual) keep(outcome, residual, at.numel * sizeof(float));
  if (!buffers.out.intact() || !buffers.wire.intact() || !buffers.residual.intact()) {
    fail(at, kernels.name, "combine wrote beside its buffers");
  }
  return outcome;
}

void compare(const Case& at, const char* kernel, const Bytes& got, const Bytes& expected, const char* what) {
  if (got != expected) fail(at, kernel, what);
}

struct Counts {
  std::uint64_t payloads[kFamilies] = {}, rejected[kFamilies] = {}, calls = 0, total = 0;
  std::uint64_t lossless = 0, lossless_refused = 0;
};

void run_case(Random& random, Family family, const std::vector<const Kernels*>& tables, Buffers& buffers,
              Counts& counts) {
  Case at;
  at.codec = random_codec(random, family);
  at.numel = random_numel(random, at.codec);
  constexpr DType kTypes[] = {DType::f32, DType::f32, DType::f16, DType::bf16};
  at.dtype = kTypes[random.below(4)];
  at.count = 1 + (random.one_in(2) ? 0 : random.below(kMostPayloads));
  at.local = random.one_in(2);
  at.encode = random.one_in(2);
  at.residual = at.encode && at.local && random.one_in(2);
  at.stream = random.one_in(4);
  at.position = at.local ? random.below(at.count + 1) : 0;
  at.divisor = random.one_in(2) ? 1 : 1 + random.below(9);
  at.key = random.next();
  at.offset = random.one_in(4) ? random.next() >> 1 : random.below(1 << 20);

  running = at;
  const bool end = !random.one_in(3);
  const std::size_t wire = wire_bytes(at.codec, at.numel, at.dtype);
  std::uint8_t* floats = buffers.local.place(at.numel * size_of(at.dtype), end);
  make_floats(random, at, floats);
  std::vector<const std::uint8_t*> payloads;
  for (std::size_t i = 0; i < at.count; ++i) {
    std::uint8_t* payload = buffers.payloads[i].place(wire, end);
    const bool whole = make_payload(random, at, *tables.back(), floats, payload, wire);
    if (whole && !check_payload(at.codec, payload, at.numel).ok()) fail(at, "check_payload", "an encoding is rejected");
    payloads.push_back(payload);
  }
  std::vector<std::uint8_t> old(at.numel * sizeof(float));
  Case floats_only = at;
  floats_only.dtype = DType::f32;
  make_floats(random, floats_only, old.data());

  const auto which = static_cast<std::size_t>(at.codec.family);
  for (const std::uint8_t* payload : payloads) {
    const Bytes expected = decode_with(*tables.back(), at, payload, buffers, end);
    for (std::size_t k = 0; k + 1 < tables.size(); ++k) {
      compare(at, tables[k]->name, decode_with(*tables[k], at, payload, buffers, end), expected,
              "decode gives other bytes");
    }
    ++counts.payloads[which];
    ++counts.total;
    if (!check_payload(at.codec, payload, at.numel).ok()) ++counts.rejected[which];
  }
  const Bytes expected = combine_with(*tables.back(), at, payloads, old, buffers, floats, end);
  for (std::size_t k = 0; k + 1 < tables.size(); ++k) {
    const Bytes got = combine_with(*tables[k], at, payloads, old, buffers, floats, end);
    compare(at, tables[k]->name, got, expected, "combine gives other bytes");
  }
  ++counts.calls;
}

// The lossless codec: all kernels write the same payload, and decode it and what damage leaves of it alike.
void run_lossless(Random& random, const std::vector<const Kernels*>& tables, Buffers& buffers, Counts& counts) {
  Case at;
  at.dtype = random.one_in(2) ? DType::f32 : DType::bf16;
  at.numel =
      random.one_in(2) ? 1 + random.below(300) : kLosslessGranule * (1 + random.below(2)) - 100 + random.below(200);
  running = at;
  const bool end = !random.one_in(3);
  const std::size_t size = size_of(at.dtype), bytes = at.numel * size, bound = lossless_bound(at.numel, size);
  std::uint8_t* const floats = buffers.local.place(bytes, end);
  make_floats(random, at, floats);
  const auto encoding = [&](const Kernels& kernels) {
    std::uint8_t* const to = buffers.wire.place(bound, end);
    const std::size_t length = kernels.lossless.encode(floats, at.numel, size, to);
    if (length > bound || !buffers.wire.intact()) fail(at, kernels.name, "lossless encode wrote beside its payload");
    return Bytes(to, to + length);
  };
  Bytes payload = encoding(*tables.back());
  for (std::size_t k = 0; k + 1 < tables.size(); ++k) {
    compare(at, tables[k]->name, encoding(*tables[k]), payload, "lossless encode gives other bytes");
  }
  const bool whole = random.one_in(2);
  for (std::size_t flips = whole ? 0 : 1 + random.below(3); flips > 0; --flips) {
    const std::size_t which = random.one_in(2) ? random.below(40) % payload.size() : random.below(payload.size());
    payload[which] ^= static_cast<std::uint8_t>(1u << random.below(8));
  }
  std::uint8_t* const from = buffers.payloads[0].place(payload.size(), end);
  std::memcpy(from, payload.data(), payload.size());
  const auto decoding = [&](const Kernels& kernels) {
    std::uint8_t* const to = buffers.out.place(bytes, end);
    const bool refused = kernels.lossless.decode(from, payload.size(), at.numel, size, to) != nullptr;
    if (!buffers.out.intact()) fail(at, kernels.name, "lossless decode wrote beside its output");
    return refused ? Bytes() : Bytes(to, to + bytes);
  };
  const Bytes expected = decoding(*tables.back());
  if (whole && expected != Bytes(floats, floats + bytes)) fail(at, "lossless", "a bit changed");
  for (std::size_t k = 0; k + 1 < tables.size(); ++k) {
    compare(at, tables[k]->name, decoding(*tables[k]), expected, "lossless decode gives other bytes");
  }
  ++counts.lossless;
  counts.lossless_refused += expected.empty();
}

// Checks sixteen arbitrary bytes as a codec: they are rejected, or the codec's sizes are consistent.
void check_codec_bytes(Random& random) {
  Codec codec;
  std::uint8_t raw[sizeof(Codec)];
  if (random.one_in(2)) {
    fill(random, raw, sizeof raw);
    raw[0] %= kFamilies + 2;
    if (random.one_in(2)) std::memset(raw + 8, 0, 8);
  } else {
    codec = random_codec(random, static_cast<Family>(random.below(kFamilies)));
    std::memcpy(raw, &codec, sizeof raw);
    raw[random.below(sizeof raw)] = static_cast<std::uint8_t>(random.next());
  }
  std::memcpy(&codec, raw, sizeof raw);
  Case at;
  at.codec = codec;
  if (!check_codec(codec).ok()) return;
  const std::size_t granule = granule_elements(codec);
  if (granule == 0 || granule > kLargestBlock) fail(at, "check_codec", "a granule of an impossible size");
  const std::size_t one = wire_bytes(codec, 1, DType::f32), full = wire_bytes(codec, granule, DType::f32);
  if (one == 0 || one > full || full > granule * 4 + granule) fail(at, "check_codec", "an impossible size");
  if (wire_bytes(codec, granule + 1, DType::f32) != full + one) fail(at, "check_codec", "granules that depend");
}

const char* option(int count, char** arguments, const char* flag) {
  for (int i = 1; i + 1 < count; ++i) {
    if (std::strcmp(arguments[i], flag) == 0) return arguments[i + 1];
  }
  return nullptr;
}

std::uint64_t number(int count, char** arguments, const char* flag, std::uint64_t fallback) {
  const char* text = option(count, arguments, flag);
  return text ? std::strtoull(text, nullptr, 10) : fallback;
}

}  // namespace

int main(int count, char** arguments) {
  const std::uint64_t most = number(count, arguments, "--payloads", 0);
  const std::uint64_t seconds = number(count, arguments, "--seconds", most ? 0 : 5);
  const std::uint64_t seed = number(count, arguments, "--seed", 1);
  std::vector<const Kernels*> tables;
  for (const Kernels* const* table = all_kernels(); *table; ++table) {
    if ((*table)->supported()) tables.push_back(*table);
  }
  watch_guard_pages();
  Random random(seed);
  Buffers buffers;
  Counts counts;
  const auto start = std::chrono::steady_clock::now();
  double elapsed = 0;
  // The families with most options come up more often.
  std::vector<int> families{3, 3, 4, 5, 6, 7, 7, 8, 10, 11};
  for (int i = 0; i < kFamilies; ++i) families.push_back(i);
  const char* only = option(count, arguments, "--family");
  for (int i = 0; only && i < kFamilies; ++i) {
    if (std::strcmp(only, family_name(static_cast<Family>(i))) == 0) families.assign(1, i);
  }
  if (only && families.size() > 1) {
    std::fprintf(stderr, "--family %s: unknown\n", only);
    return 2;
  }
  for (std::uint64_t round = 0; most == 0 || counts.total < most; ++round) {
    const auto family = static_cast<Family>(families[random.below(families.size())]);
    run_case(random, family, tables, buffers, counts);
    check_codec_bytes(random);
    if (!only && round % 16 == 0) run_lossless(random, tables, buffers, counts);
    if (round % 64 == 0) {
      elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (seconds != 0 && elapsed >= static_cast<double>(seconds)) break;
    }
  }
  elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%" PRIu64 " payloads, %" PRIu64 " combinations, %zu kernels, seed %" PRIu64 ", %.1f s\n", counts.total,
              counts.calls, tables.size(), seed, elapsed);
  for (int i = 0; i < kFamilies; ++i) {
    std::printf("  %-8s %10" PRIu64 " decoded, %" PRIu64 " rejected\n", family_name(static_cast<Family>(i)),
                counts.payloads[i], counts.rejected[i]);
  }
  std::printf("  %-8s %10" PRIu64 " decoded, %" PRIu64 " rejected\n", "lossless", counts.lossless,
              counts.lossless_refused);
  return 0;
}
