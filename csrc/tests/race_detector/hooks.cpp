// The calls that the compiler inserts for ThreadSanitizer, answered by the detector in its place. This file is not
// instrumented itself, and the program is not linked with ThreadSanitizer.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/race_detector/detector.h"

namespace {

using dtcomm::race_detector::inside;

inline void seen(const void* at, std::size_t bytes, bool stores, const void* site) {
  if (!inside) return;
  // What the detector itself calls may be instrumented.
  dtcomm::race_detector::Detector& detector = *inside;
  inside = nullptr;
  detector.access(at, bytes, stores, site);
  inside = &detector;
}

}  // namespace

#define DTCOMM_SEEN(at, bytes, stores) seen(at, bytes, stores, __builtin_return_address(0))

#define DTCOMM_SIZE(bytes)                                                       \
  void __tsan_read##bytes(void* at) { DTCOMM_SEEN(at, bytes, false); }           \
  void __tsan_write##bytes(void* at) { DTCOMM_SEEN(at, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* at) { DTCOMM_SEEN(at, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* at) { DTCOMM_SEEN(at, bytes, true); } \
  void __tsan_volatile_read##bytes(void* at) { DTCOMM_SEEN(at, bytes, false); }  \
  void __tsan_volatile_write##bytes(void* at) { DTCOMM_SEEN(at, bytes, true); }  \
  void __tsan_read_write##bytes(void* at) { DTCOMM_SEEN(at, bytes, true); }      \
  void __tsan_unaligned_read_write##bytes(void* at) { DTCOMM_SEEN(at, bytes, true); }

// Of shared_ptr, outside of lanes; kernels have none.
#define DTCOMM_ATOMIC(bits)                                                                                        \
  std::uint##bits##_t __tsan_atomic##bits##_load(const volatile std::uint##bits##_t* at, int) {                    \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                                  \
  }                                                                                                                \
  void __tsan_atomic##bits##_store(volatile std::uint##bits##_t* at, std::uint##bits##_t value, int) {             \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                                 \
  }                                                                                                                \
  std::uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile std::uint##bits##_t* at, std::uint##bits##_t value, \
                                                      int) {                                                       \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                                        \
  }                                                                                                                \
  std::uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile std::uint##bits##_t* at, std::uint##bits##_t value, \
                                                      int) {                                                       \
    return __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST);                                                        \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

DTCOMM_SIZE(1)
DTCOMM_SIZE(2)
DTCOMM_SIZE(4)
DTCOMM_SIZE(8)
DTCOMM_SIZE(16)
DTCOMM_ATOMIC(8)
DTCOMM_ATOMIC(32)
DTCOMM_ATOMIC(64)

void __tsan_read_range(void* at, std::size_t bytes) { DTCOMM_SEEN(at, bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { DTCOMM_SEEN(at, bytes, true); }

// Clang's.
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  DTCOMM_SEEN(from, bytes, false);
  DTCOMM_SEEN(to, bytes, true);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  DTCOMM_SEEN(from, bytes, false);
  DTCOMM_SEEN(to, bytes, true);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  DTCOMM_SEEN(to, bytes, true);
  return std::memset(to, value, bytes);
}

}  // extern "C"
