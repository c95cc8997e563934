#include "engine/process_handle.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "engine/platform.h"
#include "net/forked_children.h"

namespace dtcomm {
namespace {

struct Handles {
  std::mutex mutex;
  std::map<std::pair<int, std::uint64_t>, std::weak_ptr<const ProcessHandle>> handles;  // by pid and token
};

}  // namespace

std::shared_ptr<const ProcessHandle> ProcessHandle::open(int pid, std::uint64_t token) {
  Handles& all = per_process<Handles>();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto entry = all.handles.begin(); entry != all.handles.end();) {
    entry = entry->second.expired() ? all.handles.erase(entry) : std::next(entry);
  }
  std::weak_ptr<const ProcessHandle>& shared = all.handles[{pid, token}];
  std::shared_ptr<const ProcessHandle> handle = shared.lock();
  if (!handle) shared = handle = std::make_shared<const ProcessHandle>(pid);
  return handle;
}

ProcessHandle::ProcessHandle(int pid) : fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open of process " + std::to_string(pid));
  close_in_children(fd_);
}

ProcessHandle::~ProcessHandle() { close_unless_in_child(fd_); }

bool ProcessHandle::has_ended(int wait_ms) const {
  pollfd process{fd_, POLLIN, 0};
  return poll(&process, 1, wait_ms) > 0;
}

}  // namespace dtcomm
