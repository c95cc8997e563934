// topk sends the largest elements of a granule; randk sends elements at positions drawn from a key.
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

// Writes the values and positions of a granule's kept elements as a list.
void write_topk(const CodecParams& params, const KeptElements& kept, std::size_t n, const EncodeArgs& args,
                std::uint8_t* to) {
  encode_values(params, kept.value, kept.count, args.key, args.index, to);
  std::uint8_t* list = to + params.layout.values(n);
  if (params.layout.position_bits == 1) {
    __builtin_memset(list, 0, params.layout.positions(n));
    for (std::size_t i = 0; i < kept.count; ++i) {
      list[kept.position[i] / 8] = static_cast<std::uint8_t>(list[kept.position[i] / 8] | 1U << kept.position[i] % 8);
    }
  } else {
    for (std::size_t i = 0; i < kept.count; i += 2) {
      const std::uint32_t second = i + 1 < kept.count ? kept.position[i + 1] : 0;
      put_positions(list, i / 2, kept.count, kept.position[i], second);
    }
  }
  pad(params.layout, n, to);
}

void encode_topk(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args, std::uint8_t* to) {
  KeptElements kept;
  kept.count = params.layout.kept_of(n);
  const PaddedRows rows(x, n);
#if defined(__AVX512F__)
  if (params.layout.position_bits == 1) {
    std::uint8_t bitmap[kSparseGranule / 8];
    select_bitmap(rows.x, rows.n, kept.count, args.local, bitmap, kept.value);
    for (std::size_t i = 0; i < kept.count; ++i) kept.value[i] = canonical(kept.value[i]);
    encode_values(params, kept.value, kept.count, args.key, args.index, to);
    __builtin_memcpy(to + params.layout.values(n), bitmap, params.layout.positions(n));
    return pad(params.layout, n, to);
  }
#endif
  select(rows.x, rows.n, kept.count, args.local, kept.position);
  for (std::size_t i = 0; i < kept.count; ++i) kept.value[i] = canonical(unaligned<float>(x)[kept.position[i]].value);
  write_topk(params, kept, n, args, to);
}

// Encodes a whole granule of which few elements are sent, in two passes over its terms: the first finds a bound, which
// also shows that every error will be finite; the second writes the sum to the residual and looks for what reaches the
// bound. Only the sent values are then subtracted from it.
bool encode_topk_with_feedback(const CodecParams& params, const void* local, DType dtype, std::size_t n,
                               float* residual, const EncodeArgs& args, std::uint8_t* to) {
  const std::size_t k = params.layout.kept_of(n);
  if (n != kSparseGranule || 3 * k > kRow) return false;
  alignas(kLine) std::int32_t maxima[kRow];
  std::int32_t most = 0;
  KeptElements kept;
  kept.count = k;
  with_element(dtype, [&](auto kind) {
    sum_maxima<decltype(kind)>(local, residual, kSparseGranule, maxima);
    for (const std::int32_t size : maxima) most = size > most ? size : most;
    if (most >= kSafe) return;
    select_sum<decltype(kind)>(local, residual, kSparseGranule, k, reached_by(maxima, kRow, k), args, kept.position);
  });
  if (most >= kSafe) return false;
  for (std::size_t i = 0; i < k; ++i) kept.value[i] = unaligned<float>(residual)[kept.position[i]].value;
  write_topk(params, kept, n, args, to);
  decode_values(params, to, k, kept.value);
  for (std::size_t i = 0; i < k; ++i) {
    auto& error = unaligned<float>(residual)[kept.position[i]];
    error.value = error.value - kept.value[i];
  }
  return true;
}

// Reads values and positions; no payload can address elements outside the granule.
void read_topk(const CodecParams& params, const std::uint8_t* from, std::size_t n, KeptElements& kept) {
  const std::size_t most = params.layout.kept_of(n);
  decode_values(params, from, most, kept.value);
  const std::uint8_t* list = from + params.layout.values(n);
  std::size_t count = 0;
  if (params.layout.position_bits == 1) {
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

void encode_randk(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args, std::uint8_t* to) {
  KeptElements kept;
  kept.count = params.layout.kept_of(n);
  const std::uint64_t own = granule_key(args.key, args.index);
  draw_positions(own, n, kept);
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t size = magnitude(unaligned<float>(x)[i].value);
    largest = size > largest ? size : largest;
  }
  const float factor = randk_factor(n, kept.count, args.feedback), nan = float_of(kNaN32);
  for (std::size_t i = 0; i < kept.count; ++i) {
    const float value = unaligned<float>(x)[kept.position[i]].value * factor;
    kept.value[i] = largest < kInfinity32 ? value : nan;
  }
  for (std::size_t i = 0; i < kRandkHead; ++i) to[i] = static_cast<std::uint8_t>(own >> 8 * i);
  encode_values(params, kept.value, kept.count, args.key, args.index, to + kRandkHead);
  pad(params.layout, n, to);
}

// Returns false if the granule is all NaN.
bool read_randk(const CodecParams& params, const std::uint8_t* from, std::size_t n, KeptElements& kept) {
  kept.count = params.layout.kept_of(n);
  decode_values(params, from + kRandkHead, kept.count, kept.value);
  std::uint64_t own = 0;
  for (std::size_t i = 0; i < kRandkHead; ++i) own |= static_cast<std::uint64_t>(from[i]) << 8 * i;
  draw_positions(own, n, kept);
  return kept.value[0] == kept.value[0];
}

void fill(float* to, std::size_t n, std::uint32_t bits) {
  for (std::size_t i = 0; i < n; ++i) unaligned<float>(to)[i].value = float_of(bits);
}

#if defined(__AVX512F__)
// Whether positions are a bitmap, whose granules are decoded as a whole, zeros included.
bool has_bitmap(const CodecParams& params) { return params.layout.position_bits == 1; }

template <bool Stream>
void expand_topk(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to) {
  KeptElements kept;
  kept.count = params.layout.kept_of(n);
  decode_values(params, from, kept.count, kept.value);
  expand<Stream>(kept, from + params.layout.values(n), n, to);
}
#else
bool has_bitmap(const CodecParams&) { return false; }

template <bool Stream>
void expand_topk(const CodecParams&, const std::uint8_t*, std::size_t, float*) {}
#endif

void decode_topk(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  if (has_bitmap(params))
    return stream ? expand_topk<true>(params, from, n, to) : expand_topk<false>(params, from, n, to);
  KeptElements kept;
  read_topk(params, from, n, kept);
  scatter(kept, n, to, stream);
}

void add_topk(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  if (has_bitmap(params)) {
    alignas(kLine) float term[kSparseGranule];
    expand_topk<false>(params, from, n, term);
    return join(ReduceOp::sum, to, sum, term, n);
  }
  KeptElements kept;
  read_topk(params, from, n, kept);
  scatter_add(kept, n, sum, to);
}

void encode_topk_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                            std::uint8_t* to, const ErrorTarget& error) {
  encode_topk(params, x, n, args, to);
  if (has_bitmap(params)) {
    alignas(kLine) float term[kSparseGranule];
    expand_topk<false>(params, to, n, term);
    return transform<Fp32>(term, n, error.residual, error_of(x, error.divisor, error.old));
  }
  KeptElements kept;
  read_topk(params, to, n, kept);
  scatter_error(kept, n, x, error);
}

void decode_randk(const CodecParams& params, const std::uint8_t* from, std::size_t n, float* to, bool stream) {
  KeptElements kept;
  if (read_randk(params, from, n, kept)) return scatter(kept, n, to, stream);
  fill(to, n, kNaN32);
}

void add_randk(const CodecParams& params, const std::uint8_t* from, std::size_t n, const float* sum, float* to) {
  KeptElements kept;
  if (read_randk(params, from, n, kept)) return scatter_add(kept, n, sum, to);
  fill(to, n, kNaN32);
}

void encode_randk_with_error(const CodecParams& params, const float* x, std::size_t n, const EncodeArgs& args,
                             std::uint8_t* to, const ErrorTarget& error) {
  encode_randk(params, x, n, args, to);
  KeptElements kept;
  if (read_randk(params, to, n, kept)) return scatter_error(kept, n, x, error);
  if (error.residual != error.old) __builtin_memmove(error.residual, error.old, n * sizeof(float));
}

}  // namespace

const FamilyKernels kTopkFamily{encode_topk, decode_topk, add_topk, encode_topk_with_error, encode_topk_with_feedback};
const FamilyKernels kRandkFamily{encode_randk, decode_randk, add_randk, encode_randk_with_error};

}  // namespace dtcomm::DTCOMM_ISA
