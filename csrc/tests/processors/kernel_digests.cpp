// Digests of what a kernel computes from fixed inputs, to compare kernels that do not run on one processor: one line
// for each case, with the case and a digest of every output. Lines do not name the kernel, so files of two kernels are
// equal.
//
//   kernel_digests           prints the names of the kernels of this CPU
//   kernel_digests NAME [N]  prints N cases of each codec family (by default 400), and cases of the other tables
//
// Every second case runs in a floating-point environment that rounds down and flushes subnormals, as a caller may have
// set it: outputs must not depend on it.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/lossless.h"
#include "codec/reproducible.h"
#include "cpu/kernels.h"
#include "tests/fuzz_payloads.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::tests;
using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

class ScopedCallersEnv {
 public:
#if defined(__x86_64__)
  explicit ScopedCallersEnv(bool unusual) : saved_(__builtin_ia32_stmxcsr()) {
    if (unusual) __builtin_ia32_ldmxcsr(saved_ | 0x8040 | 0x2000);  // flush, denormals are zeros, round down
  }
  ~ScopedCallersEnv() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  explicit ScopedCallersEnv(bool unusual) {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    const std::uint64_t changed = saved_ | 1u << 24 | 1u << 25 | 2u << 22;  // flush, default NaN, round down
    if (unusual) asm volatile("msr fpcr, %0" : : "r"(changed) : "memory");
  }
  ~ScopedCallersEnv() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }

 private:
  std::uint64_t saved_;
#else
#error "how does this processor set the rounding of floats?"
#endif
};

std::uint64_t digest(const void* memory, std::size_t bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::size_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<const std::uint8_t*>(memory)[i]) * 0x100000001b3;
  }
  return hash;
}

template <class T>
void print(const char* what, const std::vector<T>& values) {
  std::printf(" %s %016" PRIx64, what, digest(values.data(), values.size() * sizeof(T)));
}

// The low-rank kernels do not choose which NaN they make: x86's have a sign that aarch64's lack.
void make_nan_canonical(float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] = canonical(values[i]);
}

void make_nan_canonical(Floats& values) { make_nan_canonical(values.data(), values.size()); }

Bytes floats_of(Random& random, Case at, DType dtype) {
  at.dtype = dtype;
  Bytes made(at.numel * size_of(dtype));
  make_floats(random, at, made.data());
  return made;
}

// Bytes that are not a multiple of anything behind an aligned address, as kernels accept any pointer.
class Skewed {
 public:
  Skewed(std::size_t bytes, std::size_t skew) : memory_(bytes + 64), skew_(skew), bytes_(bytes) {}
  std::uint8_t* data() { return memory_.data() + skew_; }
  Bytes value() const { return Bytes(memory_.data() + skew_, memory_.data() + skew_ + bytes_); }

 private:
  Bytes memory_;
  std::size_t skew_, bytes_;
};

// A codec's case: encode, with and without a residual, decode noise, and reduce with and without an encoding.
void codec_case(const Kernels& kernels, Family family, std::uint64_t seed) {
  Random random(seed * 64 + static_cast<std::uint64_t>(family));
  Case at;
  at.codec = random_codec(random, family);
  at.numel = random_numel(random, at.codec);
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
  constexpr DType kOthers[] = {DType::f64, DType::i8, DType::u8, DType::i32, DType::i64, DType::i16};
  const bool other = family == Family::none && random.one_in(4);
  at.dtype = other ? kOthers[random.below(6)] : kTypes[random.below(3)];
  const bool plain = family == Family::none || family == Family::fp16 || family == Family::bf16;
  const auto op = plain && random.one_in(3) ? static_cast<ReduceOp>(1 + random.below(2)) : ReduceOp::sum;
  at.count = 1 + random.below(3);
  at.position = random.below(at.count + 1);
  at.divisor = op == ReduceOp::sum && random.one_in(2) ? 1 + random.below(9) : 1;
  at.key = random.next();
  at.offset = random.one_in(4) ? random.next() >> 1 : random.below(1 << 20);
  at.stream = random.one_in(4);
  const std::size_t skew = random.one_in(2) ? 0 : random.below(64);
  const std::size_t size = at.numel * size_of(at.dtype), wire = wire_bytes(at.codec, at.numel, at.dtype);
  Bytes local(size);
  other ? fill(random, local.data(), size) : make_floats(random, at, local.data());
  const Bytes old = floats_of(random, at, DType::f32);
  std::vector<Bytes> payloads(at.count, Bytes(wire));
  std::vector<const std::uint8_t*> pointers;

  std::uint8_t raw[sizeof(Codec)];
  std::memcpy(raw, &at.codec, sizeof raw);
  for (const std::uint8_t byte : raw) std::printf("%02x", byte);
  std::printf(" dtype %d numel %zu count %zu divisor %zu op %d:", static_cast<int>(at.dtype), at.numel, at.count,
              at.divisor, static_cast<int>(op));

  const ScopedCallersEnv env(seed % 2 == 1);
  for (Bytes& payload : payloads) {
    if (other) {
      fill(random, payload.data(), wire);
    } else {
      make_payload(random, at, kernels, local.data(), payload.data(), wire);
    }
    pointers.push_back(payload.data());
    Skewed decoded(size, skew);
    kernels.decode(at.codec, payload.data(), at.numel, at.dtype, decoded.data(), at.dtype, at.stream);
    print("decode", decoded.value());
  }
  Combine call;
  call.local = local.data();
  call.local_dtype = call.dtype = call.out_dtype = at.dtype;
  call.numel = at.numel;
  call.op = op;
  call.key = at.key;
  call.offset = at.offset;
  call.stream_payload = call.stream_out = at.stream;
  const auto run = [&](const char* name, bool encodes, bool feeds_back) {
    Skewed payload(wire, skew), out(size, skew), residual(at.numel * sizeof(float), skew / 4 * 4);
    std::memcpy(residual.data(), old.data(), old.size());
    Combine each = call;
    each.payload_out = encodes ? payload.data() : nullptr;
    each.out = out.data();
    if (feeds_back) {
      each.residual_in = reinterpret_cast<const float*>(residual.data());
      each.residual_out = reinterpret_cast<float*>(residual.data());
    }
    kernels.combine(at.codec, each);
    print(name, payload.value());
    print("out", out.value());
    if (feeds_back) print("residual", residual.value());
  };
  run("encode", true, false);
  if (!other && op == ReduceOp::sum) run("encode", true, true);
  call.payloads = pointers.data();
  call.count = static_cast<int>(at.count);
  call.position = static_cast<int>(at.position);
  call.divisor = at.divisor;
  run("reduce", false, false);
  run("reduce_encode", true, false);
  if (!other && op == ReduceOp::sum) run("reduce_encode", true, true);
  std::printf("\n");
}

void low_rank_case(const Kernels& kernels, std::uint64_t seed) {
  Random random(seed * 64 + 20);
  Case at;
  const std::size_t rows = 1 + random.below(70), columns = 1 + random.below(90), rank = 1 + random.below(9);
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
  const DType dtype = kTypes[random.below(3)];
  at.numel = rows * columns;
  const Bytes gradient = floats_of(random, at, dtype), residual = floats_of(random, at, DType::f32);
  at.numel = columns * rank;
  const Bytes start = floats_of(random, at, DType::f32);
  Floats left(rows * rank), right(columns * rank), error(rows * columns);
  std::memcpy(right.data(), start.data(), start.size());
  Bytes out(gradient.size());
  const Matrix matrix{gradient.data(), reinterpret_cast<const float*>(residual.data()), dtype, rows, columns, rank};
  std::printf("low rank %zu x %zu rank %zu dtype %d:", rows, columns, rank, static_cast<int>(dtype));
  const ScopedCallersEnv env(seed % 2 == 1);
  kernels.low_rank.project_rows(matrix, right.data(), left.data());
  make_nan_canonical(left);
  print("left", left);
  kernels.low_rank.orthonormalize(left.data(), rank, rows, random.next());
  make_nan_canonical(left);
  print("orthonormal", left);
  kernels.low_rank.project_columns(matrix, left.data(), right.data());
  make_nan_canonical(right);
  print("right", right);
  kernels.low_rank.expand(matrix, left.data(), right.data(), out.data(), error.data());
  make_nan_canonical(error);
  if (dtype == DType::f32) make_nan_canonical(reinterpret_cast<float*>(out.data()), rows * columns);
  print("out", out);
  print("residual", error);
  std::printf("\n");
}

void exact_case(const Kernels& kernels, std::uint64_t seed) {
  Random random(seed * 64 + 21);
  Case at;
  at.codec = random_codec(random, Family::exact);
  at.numel = random_numel(random, at.codec);
  const std::size_t ranks = 1 + random.below(8), blocks = (at.numel + at.codec.block - 1) / at.codec.block;
  const Bytes local = floats_of(random, at, DType::f32);
  const Bytes old = floats_of(random, at, DType::f32);
  Floats residual(at.numel), out(at.numel);
  std::memcpy(residual.data(), old.data(), old.size());
  Bytes exponents(blocks), codes(at.numel * at.codec.bits / 8);
  std::vector<std::uint64_t> sums((at.numel + kAuditRun - 1) / kAuditRun);
  const Contribution from{local.data(), DType::f32, residual.data(), at.numel};
  std::printf("exact bits %d block %u numel %zu ranks %zu:", at.codec.bits, at.codec.block, at.numel, ranks);
  const ScopedCallersEnv env(seed % 2 == 1);
  kernels.local.measure_exponents(at.codec, from, exponents.data());
  print("exponents", exponents);
  kernels.local.quantize_to_exponents(at.codec, ranks, from, exponents.data(), codes.data());
  print("codes", codes);
  print("residual", residual);
  kernels.local.dequantize(at.codec, ranks, codes.data(), exponents.data(), at.numel, ranks, DType::f32, out.data());
  print("out", out);
  kernels.local.audit_checksums(at.codec.bits, codes.data(), at.numel, sums.data());
  print("sums", sums);
  std::printf("\n");
}

void rounded_sum_case(const Kernels& kernels, std::uint64_t seed) {
  Random random(seed * 64 + 23);
  Case at;
  at.codec = random_codec(random, Family::exact);
  at.numel = random_numel(random, at.codec);
  const std::size_t ranks = 2 + random.below(63), blocks = (at.numel + kRoundedBlock - 1) / kRoundedBlock;
  const Bytes local = floats_of(random, at, DType::f32);
  const Contribution from{local.data(), DType::f32, nullptr, at.numel};
  Bytes tops(blocks), lows(blocks);
  std::printf("rounded numel %zu ranks %zu:", at.numel, ranks);
  const ScopedCallersEnv env(seed % 2 == 1);
  kernels.local.measure_digits(from, true, tops.data(), lows.data());
  print("tops", tops);
  print("lows", lows);
  const DigitCuts cuts(ranks);
  std::size_t halves = 0;
  for (std::size_t b = 0; b < blocks; ++b) halves += cuts.halves[span_of(tops[b], lows[b])];
  const SumDigits sum{ranks, tops.data(), lows.data()};
  std::vector<std::int32_t> digits(halves * kHalfBlock);
  kernels.local.split_digits(sum, from, false, digits.data());
  print("digits", digits);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Bytes out(at.numel * size_of(dtype));
    kernels.local.round_digits(sum, digits.data(), at.numel, ranks, dtype, out.data());
    print("out", out);
  }
  std::printf("\n");
}

void shared_randk_case(const Kernels& kernels, std::uint64_t seed) {
  Random random(seed * 64 + 22);
  Case at;
  at.codec = random_codec(random, Family::randk);
  at.numel = random_numel(random, at.codec);
  const Bytes local = floats_of(random, at, DType::f32), old = floats_of(random, at, DType::f32);
  Floats residual(at.numel), values(at.numel), kept(at.numel), out(at.numel);
  std::memcpy(residual.data(), old.data(), old.size());
  const Contribution from{local.data(), DType::f32, residual.data(), at.numel};
  const std::uint64_t key = random.next(), offset = random.below(1 << 20);
  std::printf("shared randk kept %u numel %zu:", at.codec.kept, at.numel);
  const ScopedCallersEnv env(seed % 2 == 1);
  kernels.local.gather_values(at.codec, key, offset, from, values.data(), kept.data());
  print("values", values);
  print("residuals", kept);
  kernels.local.scatter_values(at.codec, key, offset, true, values.data(), at.numel, DType::f32, out.data());
  print("out", out);
  kernels.local.restore_residual(at.codec, key, offset, kept.data(), at.numel, residual.data());
  print("residual", residual);
  std::printf("\n");
}

// A payload of bf16 or fp32, and what comes back from it: every bit.
void lossless_case(const Kernels& kernels, std::uint64_t seed) {
  Random random(seed * 64 + 23);
  Case at;
  at.numel = 1 + random.below(kMostElements);
  const std::size_t size = random.one_in(2) ? 2 : 4;
  Bytes x = floats_of(random, at, size == 2 ? DType::bf16 : DType::f32);
  if (random.one_in(8)) fill(random, x.data(), x.size());
  Bytes payload(lossless_bound(at.numel, size)), out(x.size());
  payload.resize(kernels.lossless.encode(x.data(), at.numel, size, payload.data()));
  std::printf("lossless size %zu numel %zu bytes %zu:", size, at.numel, payload.size());
  print("payload", payload);
  const char* const error = kernels.lossless.decode(payload.data(), payload.size(), at.numel, size, out.data());
  std::printf(" %s\n", error ? error : out == x ? "equal" : "differs");
}

// A granule of a delta of weights of any kind, what comes back from it, and what other weights and damage do to it.
void delta_case(const Kernels& kernels, std::uint64_t seed) {
  Random random(seed * 64 + 24);
  const auto kind = static_cast<WeightKind>(random.below(kWeightKinds));
  const std::size_t size = layout_of(kind).size, n = random.one_in(16) ? kDeltaGranule : 1 + random.below(3000);
  const auto [old, fresh] = versions_of_weights(random, n, size);
  std::vector<std::uint32_t> room(kDeltaRoom);
  Bytes granule(delta_granule_bound(n, size) + kDeltaSlack);
  std::size_t changed = 0;
  const std::size_t bytes =
      kernels.delta.encode(kind, old.data(), fresh.data(), n, room.data(), granule.data(), &changed);
  granule.resize(bytes);
  std::printf("delta kind %d numel %zu bytes %zu changed %zu:", static_cast<int>(kind), n, bytes, changed);
  print("granule", granule);
  granule.resize(bytes + kDeltaPadding);
  const auto decode = [&, &made = fresh](const Bytes& from) {
    Bytes weights = from;
    const char* const refused = kernels.delta.check(kind, granule.data(), bytes, n, from.data());
    kernels.delta.decode(kind, granule.data(), bytes, n, room.data(), weights.data());
    std::printf(" %s", refused ? refused : weights == made ? "equal" : "differs");
    if (!refused) print("weights", weights);
  };
  decode(old);
  decode(fresh);
  if (bytes > 0) {
    granule[random.below(bytes)] ^= static_cast<std::uint8_t>(1u << random.below(8));
    decode(old);
  }
  std::printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    for (const Kernels* const* table = all_kernels(); *table; ++table) {
      if ((*table)->supported()) std::puts((*table)->name);
    }
    return 0;
  }
  const Kernels* const kernels = find_kernels(arguments[1]);
  if (!kernels) {
    std::fprintf(stderr, "kernel_digests: this CPU has no kernel \"%s\"\n", arguments[1]);
    return 2;
  }
  const std::uint64_t cases = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 400;
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    for (int family = 0; family < kFamilies; ++family) {
      if (static_cast<Family>(family) != Family::exact) codec_case(*kernels, static_cast<Family>(family), seed);
    }
    low_rank_case(*kernels, seed);
    exact_case(*kernels, seed);
    rounded_sum_case(*kernels, seed);
    shared_randk_case(*kernels, seed);
    lossless_case(*kernels, seed);
    delta_case(*kernels, seed);
  }
  return 0;
}
