// A handle of another process (a pidfd), by which this one learns of its end.
#pragma once

#include <cstdint>
#include <memory>

namespace dtcomm {

class ProcessHandle {
 public:
  // The handle of the process `pid` that announced `token`; all communicators share one, so that the descriptors of a
  // process do not grow with their number. A later process with the same pid has another token. Throws
  // std::system_error if there is no such process or no descriptor is left.
  static std::shared_ptr<const ProcessHandle> open(int pid, std::uint64_t token);
  explicit ProcessHandle(int pid);
  ~ProcessHandle();
  ProcessHandle(const ProcessHandle&) = delete;

  // Whether the process has ended, waiting at most `wait_ms` for it.
  bool has_ended(int wait_ms) const;

 private:
  int fd_;
};

}  // namespace dtcomm
