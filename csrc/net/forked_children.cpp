#include "net/forked_children.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace dtcomm {
namespace {

struct InheritedFds {
  std::mutex mutex;
  std::vector<int> fds;
};

InheritedFds& inherited() {
  static auto* const instance = [] {
    auto* fds = new InheritedFds;  // never freed: a child may be forked while the process exits
    pthread_atfork([] { inherited().mutex.lock(); }, [] { inherited().mutex.unlock(); },
                   [] {
                     for (const int fd : inherited().fds) ::close(fd);
                     inherited().fds.clear();
                     inherited().mutex.unlock();
                   });
    return fds;
  }();
  return *instance;
}

}  // namespace

void close_in_children(int fd) {
  InheritedFds& children = inherited();
  const std::lock_guard<std::mutex> lock(children.mutex);
  children.fds.push_back(fd);
}

void close_unless_in_child(int fd) {
  InheritedFds& children = inherited();
  const std::lock_guard<std::mutex> lock(children.mutex);
  const auto found = std::find(children.fds.begin(), children.fds.end(), fd);
  if (found == children.fds.end()) return;
  children.fds.erase(found);
  ::close(fd);
}

}  // namespace dtcomm
