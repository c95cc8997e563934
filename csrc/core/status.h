// How the native core reports errors. Each kind of outcome has one channel:
//
//   - A function that answers "is this valid?" or "can this be done?" returns a `Status`: OK, or a message that says
//     what is wrong. The caller decides what to do with it; the bindings raise ValueError. A function that queues work
//     on a CUDA device returns one, too, with CUDA's reason.
//   - A function that cannot deliver its result throws: std::invalid_argument for wrong arguments (ValueError in
//     Python), std::system_error where the operating system refused (OSError), ClosedError (core/error.h) for calls on
//     a closed communicator.
//   - A collective that cannot complete throws `Error` (core/error.h), which carries a kind and the failed rank. The
//     other ranks learn of it, and the bindings raise the exception of dtcomm.errors that belongs to the kind.
//   - A value that may be absent is a std::optional or a null pointer, never a bool with an output parameter.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace dtcomm {

class [[nodiscard]] Status {
 public:
  // OK.
  Status() = default;
  static Status error(std::string message) {
    Status status;
    status.message_ = std::move(message);
    return status;
  }

  bool ok() const { return message_.empty(); }
  // Empty if OK.
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

// Turns a Status about arguments into the exception that a constructor or parser throws.
inline void throw_if_invalid(const Status& status) {
  if (!status.ok()) throw std::invalid_argument(status.message());
}

}  // namespace dtcomm
