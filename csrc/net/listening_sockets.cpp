#include "net/listening_sockets.h"

#include <dirent.h>
#include <sys/socket.h>

#include <cstdlib>

namespace dtcomm {

bool ListeningSocket::is_open() const {
  struct stat status{};
  return fstat(descriptor, &status) == 0 && status.st_ino == inode;
}

std::vector<ListeningSocket> listening_sockets() {
  std::vector<ListeningSocket> found;
  DIR* const directory = opendir("/proc/self/fd");
  if (!directory) return found;
  while (const dirent* const entry = readdir(directory)) {
    const int descriptor = static_cast<int>(std::strtol(entry->d_name, nullptr, 10));
    int listens = 0;
    socklen_t size = sizeof listens;
    struct stat status{};
    if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || !listens) continue;
    if (fstat(descriptor, &status) == 0) found.push_back({descriptor, status.st_ino});
  }
  closedir(directory);
  return found;
}

}  // namespace dtcomm
