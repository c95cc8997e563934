#include "engine/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
// Newer clang counts the instruction as a feature of its own, which older compilers do not know.
#if defined(__clang__) && __clang_major__ >= 14
#define DTCOMM_CRC __attribute__((target("sse4.2,crc32")))
#else
#define DTCOMM_CRC __attribute__((target("sse4.2")))
#endif
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define DTCOMM_CRC
#endif

namespace dtcomm {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;
constexpr std::size_t kWord = 8;

using Table = std::array<std::array<std::uint32_t, 256>, kWord>;

// tables[k][b]: how byte b changes the register when k more bytes follow it.
constexpr Table make_tables() {
  Table tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < kWord; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = before >> 8 ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Table kTables = make_tables();

std::uint64_t word_at(const std::uint8_t* at) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < kWord; ++i) word |= std::uint64_t{at[i]} << (8 * i);
  return word;
}

std::uint32_t table_register(std::uint32_t crc, const std::uint8_t* at, std::size_t bytes) {
  for (; bytes >= kWord; bytes -= kWord, at += kWord) {
    const std::uint64_t word = word_at(at) ^ crc;
    crc = 0;
    for (std::size_t i = 0; i < kWord; ++i) crc ^= kTables[kWord - 1 - i][word >> (8 * i) & 0xff];
  }
  for (; bytes > 0; --bytes, ++at) crc = crc >> 8 ^ kTables[0][(crc ^ *at) & 0xff];
  return crc;
}

#ifdef DTCOMM_CRC

// The instruction can start every cycle but takes three cycles, so three runs of the data are computed side by side, of
// kRun bytes each: 12 KiB fit into the first-level cache.
constexpr std::size_t kRun = 4096;

// Advances the register over kRun zero bytes. That is a linear function, so it takes a table for each byte.
class Skip {
 public:
  Skip() {
    std::array<std::uint8_t, kRun> zeros{};
    std::array<std::uint32_t, 32> columns{};
    for (std::size_t bit = 0; bit < 32; ++bit) columns[bit] = table_register(1u << bit, zeros.data(), kRun);
    for (std::size_t k = 0; k < 4; ++k) {
      for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = 0;
        for (std::size_t bit = 0; bit < 8; ++bit) value ^= byte >> bit & 1 ? columns[8 * k + bit] : 0;
        tables_[k][byte] = value;
      }
    }
  }
  std::uint32_t operator()(std::uint32_t crc) const {
    return tables_[0][crc & 0xff] ^ tables_[1][crc >> 8 & 0xff] ^ tables_[2][crc >> 16 & 0xff] ^ tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_{};
};

DTCOMM_CRC inline std::uint32_t step(std::uint32_t crc, const std::uint8_t* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, kWord);
#if defined(__x86_64__)
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

DTCOMM_CRC std::uint32_t hardware_register(std::uint32_t crc, const std::uint8_t* at, std::size_t bytes) {
  if (bytes >= 3 * kRun) {
    static const Skip skip;
    for (; bytes >= 3 * kRun; bytes -= 3 * kRun, at += 3 * kRun) {
      std::uint32_t second = 0;
      std::uint32_t third = 0;
      for (std::size_t i = 0; i < kRun; i += kWord) {
        crc = step(crc, at + i);
        second = step(second, at + kRun + i);
        third = step(third, at + 2 * kRun + i);
      }
      crc = skip(skip(crc) ^ second) ^ third;
    }
  }
  for (; bytes >= kWord; bytes -= kWord, at += kWord) crc = step(crc, at);
  return table_register(crc, at, bytes);
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  return true;
#endif
}

#endif

}  // namespace

std::uint32_t crc32c_by_table(const void* data, std::size_t bytes) {
  return ~table_register(~0u, static_cast<const std::uint8_t*>(data), bytes);
}

#ifdef DTCOMM_CRC

bool crc32c_in_hardware() {
  static const bool has = has_instruction();
  return has;
}

std::uint32_t crc32c(const void* data, std::size_t bytes) {
  if (!crc32c_in_hardware()) return crc32c_by_table(data, bytes);
  return ~hardware_register(~0u, static_cast<const std::uint8_t*>(data), bytes);
}

#else

bool crc32c_in_hardware() { return false; }

std::uint32_t crc32c(const void* data, std::size_t bytes) { return crc32c_by_table(data, bytes); }

#endif

}  // namespace dtcomm
