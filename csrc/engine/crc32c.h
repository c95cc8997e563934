// CRC32C (Castagnoli's polynomial, bits reflected, ~0 before and after): what iSCSI, ext4 and the processors' crc32
// instructions compute. The same value with and without the instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtcomm {

constexpr std::uint32_t kChecksumBytes = 4;  // what a checksum adds to a message

// Of `bytes` bytes; by the instruction where the CPU has it.
std::uint32_t crc32c(const void* data, std::size_t bytes);
// By tables alone.
std::uint32_t crc32c_by_table(const void* data, std::size_t bytes);
// Whether crc32c() uses the instruction.
bool crc32c_in_hardware();

}  // namespace dtcomm
