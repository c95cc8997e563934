// Failures of collectives. core/status.h describes how the core reports other errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dtcomm {

// The numbers travel between ranks in failure records: append only. The bindings turn each kind into the exception
// of the same name in dtcomm.errors.
enum class ErrorKind : std::uint32_t { none = 0, timeout = 1, peer_lost = 2, mismatch = 3, corrupt = 4, internal = 5 };

// Whether a number that another rank sent is a kind of failure.
inline bool is_failure(std::uint64_t kind) {
  return kind > static_cast<std::uint64_t>(ErrorKind::none) && kind <= static_cast<std::uint64_t>(ErrorKind::internal);
}

// A collective that cannot complete. `failed_rank` is the rank at fault, or -1 if it is unknown.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int failed_rank = -1)
      : std::runtime_error(message), kind_(kind), failed_rank_(failed_rank) {}
  ErrorKind kind() const { return kind_; }
  int failed_rank() const { return failed_rank_; }

 private:
  ErrorKind kind_;
  int failed_rank_;
};

// A call on a communicator that this rank has closed, or an operation that the closing ended. No rank is at fault, and
// the peers are not told of an error.
class ClosedError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace dtcomm
