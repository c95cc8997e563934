// Failures of the engine; the bindings turn each kind into the Python error of the same name.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dtcomm {

// The numbers travel between ranks in failure records: append only.
enum class ErrorKind : std::uint32_t { none = 0, timeout = 1, peer_lost = 2, mismatch = 3, corrupt = 4, internal = 5 };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace dtcomm
