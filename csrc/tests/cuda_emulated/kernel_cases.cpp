#include "tests/cuda_emulated/kernel_cases.h"

#include <cmath>
#include <cstring>

#include "codec/layout.h"

namespace dtcomm::cuda_emulated {

namespace {

constexpr std::size_t kGuard = 64;

bool elementwise(const Codec& codec) {
  return codec.family == Family::none || codec.family == Family::fp16 || codec.family == Family::bf16;
}

float value_of(unsigned kind, std::size_t i, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const float x = normal(random);
  switch (kind) {
    case 0:
      return x;
    case 1:  // magnitudes of all sizes, subnormal to Inf
      return x * std::exp(normal(random) * 35.0f);
    case 2: {  // blocks of their own scale
      const float factors[] = {1e-30f, 1e30f, 0.0f, 1e-40f, 1.0f, 3e38f, 2e-38f};
      return std::fmin(std::fmax(x, -1.0f), 1.0f) * factors[i / 48 % 7];
    }
    case 3:  // ties
      return i % 16 == 0 ? 127.0f : static_cast<float>(static_cast<int>(random() % 509) - 254) / 2;
    case 4: {  // mostly numbers
      const unsigned chance = random() % 1000;
      return chance < 4 ? NAN : chance < 7 ? INFINITY : chance < 10 ? -INFINITY : x;
    }
    case 5:
      return float_of(static_cast<std::uint32_t>(random()));
    case 6:
      return random() % 2 ? 0.0f : -0.0f;
    case 7:
      return x * 0.01f + 5.0f;
    default:
      return -std::fabs(x) - 1.0f;
  }
}

}  // namespace

void fill(DType dtype, unsigned seed, std::size_t numel, std::uint8_t* to) {
  std::mt19937 random(seed);
  const unsigned kind = seed % 9;
  for (std::size_t i = 0; i < numel; ++i) {
    const float value = value_of(kind, i, random);
    const std::uint16_t half = dtype == DType::f16 ? fp16_from_float(value) : bf16_from_float(value);
    switch (dtype) {
      case DType::f32:
        std::memcpy(to + i * 4, &value, 4);
        break;
      case DType::f16:
      case DType::bf16:
        std::memcpy(to + i * 2, &half, 2);
        break;
      case DType::f64: {
        const double wide = static_cast<double>(value);
        std::memcpy(to + i * 8, &wide, 8);
        break;
      }
      default:
        for (std::size_t b = 0; b < size_of(dtype); ++b) {
          to[i * size_of(dtype) + b] = static_cast<std::uint8_t>(random() % (dtype == DType::boolean ? 3 : 256));
        }
    }
  }
}

std::uint8_t* Memory::reserve(std::vector<std::uint8_t>& bytes, std::size_t size, std::size_t shift) {
  bytes.assign(size + 2 * kGuard + kAlign, 0xA5);
  const auto start = reinterpret_cast<std::uintptr_t>(bytes.data()) + kGuard;
  return reinterpret_cast<std::uint8_t*>(aligned(start) + shift);
}

Memory::Memory(const Codec& codec, const Case& which) : payload_memory_(static_cast<std::size_t>(which.count)) {
  const Kernels& cpu = *find_kernels("generic");
  const std::size_t bytes = wire_bytes(codec, which.numel, which.dtype);
  for (std::size_t t = 0; t < payload_memory_.size(); ++t) {
    const unsigned seed = which.seed + 100 * static_cast<unsigned>(t + 1);
    std::vector<std::uint8_t> x(which.numel * size_of(which.dtype));
    fill(which.dtype, t % 3 == 2 ? seed / 9 * 9 : seed, which.numel, x.data());  // a third of them tame
    std::uint8_t* payload = reserve(payload_memory_[t], bytes, 0);
    Combine encode;
    encode.local = x.data();
    encode.local_dtype = encode.dtype = encode.out_dtype = which.dtype;
    encode.numel = which.numel;
    encode.key = seed;
    encode.payload_out = payload;
    cpu.combine(codec, encode);
    payloads_.push_back(payload);
  }
  const auto tensor = [&](std::vector<std::uint8_t>& memory, DType dtype, unsigned seed) {
    std::uint8_t* at = reserve(memory, which.numel * size_of(dtype), which.shift * size_of(dtype));
    fill(dtype, seed, which.numel, at);
    return at;
  };
  call.payloads = payloads_.data();
  call.count = which.count;
  call.position = which.position;
  call.local_dtype = which.local_dtype;
  call.out_dtype = which.out_dtype;
  call.dtype = which.dtype;
  call.numel = which.numel;
  call.divisor = which.divisor;
  call.op = which.op;
  call.key = 0x0123456789abcdefULL * (which.seed + 1);
  call.offset = which.seed % 2 ? 1000 : (1ULL << 32) - which.numel / 2;  // the counter's high half changes on the way
  if (which.local) call.local = tensor(local_, which.local_dtype, which.seed);
  if (which.residual)
    call.residual_in = call.residual_out =
        reinterpret_cast<float*>(tensor(residual_, DType::f32, which.seed / 9 * 9 + 5 * (which.seed % 2)));
  if (which.encodes) call.payload_out = reserve(payload_, bytes, 0);
  if (which.out) call.out = which.in_place ? const_cast<void*>(call.local) : tensor(out_, which.out_dtype, 0);
}

const char* Memory::differs(const Memory& other) const {
  // The guards, too. Buffers start at other places within sixteen bytes, so compare from the memory's own start.
  const auto same = [](const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
    const auto start = [](const std::vector<std::uint8_t>& bytes) {
      const auto at = reinterpret_cast<std::uintptr_t>(bytes.data()) + kGuard;
      return bytes.empty() ? bytes.data() : bytes.data() + (aligned(at) - at);
    };
    return a.size() == b.size() && (a.empty() || std::memcmp(start(a), start(b), a.size() - kAlign) == 0);
  };
  if (!same(payload_, other.payload_)) return "the payload";
  if (!same(out_, other.out_)) return "the output";
  if (!same(residual_, other.residual_)) return "the residual";
  if (!same(local_, other.local_)) return "the local tensor";
  for (std::size_t t = 0; t < payload_memory_.size(); ++t) {
    if (!same(payload_memory_[t], other.payload_memory_[t])) return "an input payload";
  }
  return nullptr;
}

std::vector<Case> cases(const Codec& codec) {
  std::vector<Case> all;
  std::mt19937 random(codec.block * 8U + codec.bits + codec.kept);
  const auto one_of = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  const DType floats[] = {DType::f32, DType::f16, DType::bf16};
  for (const std::size_t numel : {1, 3, 8, 17, 31, 100, 257, 1000, 1025, 2047, 4095, 4097, 9000}) {
    // Long tensors take as long as all the others together.
    if (numel > 2000 && one_of(3)) continue;
    for (int variant = 0; variant < 3; ++variant) {
      Case test_case;
      test_case.numel = numel;
      test_case.seed = one_of(100000);
      test_case.dtype = floats[one_of(3)];
      if (codec.family == Family::none && one_of(2)) test_case.dtype = static_cast<DType>(one_of(10));
      const bool exact = size_of(test_case.dtype) != 2 && test_case.dtype != DType::f32;
      const bool floating = !exact && test_case.dtype != DType::i16;
      const int counts[] = {0, 1, 1, 2, 3, 4, 5, 8, 9, 17};
      test_case.count = variant < 1 ? 0 : counts[one_of(10)];
      test_case.local = test_case.count == 0 || one_of(2);
      test_case.position = static_cast<int>(one_of(static_cast<unsigned>(test_case.count) + 1));
      test_case.encodes = variant < 2;
      test_case.residual = floating && one_of(2) && (test_case.local || test_case.encodes);
      test_case.out = !test_case.encodes || one_of(2);
      test_case.local_dtype = floating && one_of(3) == 0 ? DType::f32 : test_case.dtype;
      test_case.out_dtype = floating && one_of(3) == 0 ? DType::f32 : test_case.dtype;
      test_case.in_place =
          test_case.out && test_case.local && test_case.local_dtype == test_case.out_dtype && one_of(3) == 0;
      test_case.divisor = floating && one_of(2) ? 1 + one_of(9) : 1;
      test_case.shift = one_of(2) ? 0 : one_of(4);
      if (elementwise(codec) && test_case.count && !test_case.residual) test_case.op = static_cast<ReduceOp>(one_of(3));
      if (test_case.count == 0 && !test_case.encodes && exact) test_case.local = true;
      all.push_back(test_case);
    }
    Case decode;
    decode.numel = numel;
    decode.seed = one_of(100000);
    decode.dtype = floats[one_of(3)];
    decode.out_dtype = floats[one_of(3)];
    decode.count = 1;
    decode.local = decode.encodes = false;
    decode.out = decode.decodes = true;
    decode.shift = one_of(3);
    all.push_back(decode);
  }
  return all;
}

std::string describe(const Codec& codec) {
  char text[200];
  std::snprintf(text, sizeof text,
                "family %d bits %d scale %d symmetric %d stochastic %d rotate %d spikes %d element %d block %u kept %u",
                static_cast<int>(codec.family), codec.bits, static_cast<int>(codec.scale), codec.symmetric,
                codec.stochastic, codec.rotate, codec.spikes, static_cast<int>(codec.element), codec.block, codec.kept);
  return text;
}

std::string describe(const Case& which) {
  char text[300];
  std::snprintf(text, sizeof text,
                "numel %zu dtype %d local %d/%d out %d/%d count %d position %d residual %d encodes %d in_place %d "
                "divisor %zu op %d shift %u seed %u decodes %d",
                which.numel, static_cast<int>(which.dtype), which.local, static_cast<int>(which.local_dtype), which.out,
                static_cast<int>(which.out_dtype), which.count, which.position, which.residual, which.encodes,
                which.in_place, which.divisor, static_cast<int>(which.op), which.shift, which.seed, which.decodes);
  return text;
}

}  // namespace dtcomm::cuda_emulated
