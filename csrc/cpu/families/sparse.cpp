// topk: the largest elements of a granule. randk: elements at positions that come from a key.
#include "cpu/source/codec_family.h"
#include "cpu/source/sparse_values.h"
#include "cpu/source/topk_select.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

// Magnitudes below this encode to numbers in every type of values.
constexpr std::int32_t kSafe = 0x47000000;  // 32768

void pad(const Layout& layout, std::size_t n, std::uint8_t* to) {
  const std::size_t used = layout.used(n);
  __builtin_memset(to + used, 0, layout.bytes(n) - used);
}

// Values and positions of a granule whose kept elements are known.
void write_topk(const Plan& plan, const Kept& kept, std::size_t n, const Encoding& how, std::uint8_t* to) {
  encode_values(plan, kept.value, kept.count, how.key, how.index, to);
  std::uint8_t* list = to + plan.layout.values(n);
  if (plan.layout.position_bits == 1) {
    __builtin_memset(list, 0, plan.layout.positions(n));
    for (std::size_t i = 0; i < kept.count; ++i) {
      list[kept.position[i] / 8] = static_cast<std::uint8_t>(list[kept.position[i] / 8] | 1U << kept.position[i] % 8);
    }
  } else {
    for (std::size_t i = 0; i < kept.count; i += 2) {
      const std::uint32_t second = i + 1 < kept.count ? kept.position[i + 1] : 0;
      put_positions(list, i / 2, kept.count, kept.position[i], second);
    }
  }
  pad(plan.layout, n, to);
}

void encode_topk(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  Kept kept;
  kept.count = plan.layout.kept_of(n);
  select(x, n, kept.count, how.local, kept.position);
  for (std::size_t i = 0; i < kept.count; ++i) kept.value[i] = canonical(cells<float>(x)[kept.position[i]].value);
  write_topk(plan, kept, n, how, to);
}

// A whole granule of which little is sent. Twice over the terms: once for a bound, which also shows that every error
// will be a number; then the sum takes the residual's place, and only what is sent has to be taken from it.
bool owe_topk(const Plan& plan, const void* local, DType dtype, std::size_t n, float* residual, const Encoding& how,
              std::uint8_t* to) {
  const std::size_t k = plan.layout.kept_of(n);
  if (n != kSparseGranule || 3 * k > kRow) return false;
  alignas(kLine) std::int32_t maxima[kRow];
  bool safe = true;
  with_element(dtype, [&](auto kind) {
    sum_maxima<decltype(kind)>(local, residual, kSparseGranule, maxima);
    for (std::size_t g = 0; g < kRow; ++g) safe = safe && maxima[g] < kSafe;
    if (safe) sum_in_place<decltype(kind)>(local, residual, kSparseGranule, how.local);
  });
  if (!safe) return false;
  Kept kept;
  kept.count = k;
  select_from(residual, n, k, reached_by(maxima, kRow, k), how.residual, kept.position);
  for (std::size_t i = 0; i < k; ++i) kept.value[i] = cells<float>(residual)[kept.position[i]].value;
  write_topk(plan, kept, n, how, to);
  decode_values(plan, to, k, kept.value);
  for (std::size_t i = 0; i < k; ++i) {
    auto& owed = cells<float>(residual)[kept.position[i]];
    owed.value = owed.value - kept.value[i];
  }
  return true;
}

// What a payload says; nothing in it can lead out of the granule.
void read_topk(const Plan& plan, const std::uint8_t* from, std::size_t n, Kept& kept) {
  const std::size_t most = plan.layout.kept_of(n);
  decode_values(plan, from, most, kept.value);
  const std::uint8_t* list = from + plan.layout.values(n);
  std::size_t count = 0;
  if (plan.layout.position_bits == 1) {
    for (std::size_t byte = 0; 8 * byte < n; ++byte) {
      for (unsigned bits = list[byte]; bits && count < most; bits &= bits - 1) {
        const std::size_t at = 8 * byte + static_cast<std::size_t>(__builtin_ctz(bits));
        if (at < n) kept.position[count++] = static_cast<std::uint16_t>(at);
      }
    }
  } else {
    for (std::size_t i = 0; i < most; ++i) {
      const std::uint32_t at = position_at(list, i);
      if (at >= n) continue;
      kept.position[count] = static_cast<std::uint16_t>(at);
      kept.value[count++] = kept.value[i];
    }
  }
  kept.count = count;
}

void encode_randk(const Plan& plan, const float* x, std::size_t n, const Encoding& how, std::uint8_t* to) {
  Kept kept;
  kept.count = plan.layout.kept_of(n);
  const std::uint64_t own = granule_key(how.key, how.index);
  draw(own, n, kept);
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t size = magnitude(cells<float>(x)[i].value);
    largest = size > largest ? size : largest;
  }
  const float factor = randk_factor(n, kept.count, how.feedback), nan = float_of(kNaN32);
  for (std::size_t i = 0; i < kept.count; ++i) {
    const float value = cells<float>(x)[kept.position[i]].value * factor;
    kept.value[i] = largest < kInfinity32 ? value : nan;
  }
  for (std::size_t i = 0; i < kRandkHead; ++i) to[i] = static_cast<std::uint8_t>(own >> 8 * i);
  encode_values(plan, kept.value, kept.count, how.key, how.index, to + kRandkHead);
  pad(plan.layout, n, to);
}

// False: the granule is NaN everywhere.
bool read_randk(const Plan& plan, const std::uint8_t* from, std::size_t n, Kept& kept) {
  kept.count = plan.layout.kept_of(n);
  decode_values(plan, from + kRandkHead, kept.count, kept.value);
  std::uint64_t own = 0;
  for (std::size_t i = 0; i < kRandkHead; ++i) own |= static_cast<std::uint64_t>(from[i]) << 8 * i;
  draw(own, n, kept);
  return kept.value[0] == kept.value[0];
}

void fill(float* to, std::size_t n, std::uint32_t bits) {
  for (std::size_t i = 0; i < n; ++i) cells<float>(to)[i].value = float_of(bits);
}

void decode_topk(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  Kept kept;
  read_topk(plan, from, n, kept);
  scatter(kept, n, to, stream);
}

void add_topk(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  Kept kept;
  read_topk(plan, from, n, kept);
  scatter_add(kept, n, sum, to);
}

void lost_topk(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor,
               const float* old, float* residual) {
  Kept kept;
  read_topk(plan, from, n, kept);
  scatter_lost(kept, n, sum, divisor, old, residual);
}

void decode_randk(const Plan& plan, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  Kept kept;
  if (read_randk(plan, from, n, kept)) return scatter(kept, n, to, stream);
  fill(to, n, kNaN32);
}

void add_randk(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  Kept kept;
  if (read_randk(plan, from, n, kept)) return scatter_add(kept, n, sum, to);
  fill(to, n, kNaN32);
}

void lost_randk(const Plan& plan, const std::uint8_t* from, std::size_t n, const float* sum, float divisor,
                const float* old, float* residual) {
  Kept kept;
  if (read_randk(plan, from, n, kept)) return scatter_lost(kept, n, sum, divisor, old, residual);
  if (residual != old) __builtin_memmove(residual, old, n * sizeof(float));
}

}  // namespace

const FamilyKernels kTopkFamily{encode_topk, decode_topk, add_topk, lost_topk, owe_topk};
const FamilyKernels kRandkFamily{encode_randk, decode_randk, add_randk, lost_randk};

}  // namespace dtcomm::DTCOMM_ISA
