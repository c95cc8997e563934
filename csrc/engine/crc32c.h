// CRC32C (Castagnoli's polynomial, bits reflected, ~0 before and after), the checksum of iSCSI, ext4 and the
// processors' crc32 instructions. The value is the same with and without the instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtcomm {

constexpr std::uint32_t kChecksumBytes = 4;  // that a checksum adds to a message

// The checksum of `bytes` bytes, computed with the instruction if the CPU has it.
std::uint32_t crc32c(const void* data, std::size_t bytes);
// The same, computed with tables.
std::uint32_t crc32c_by_table(const void* data, std::size_t bytes);
// Whether crc32c() uses the instruction.
bool crc32c_in_hardware();

}  // namespace dtcomm
