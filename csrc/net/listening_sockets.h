// The sockets of this process at which it listens.
#pragma once

#include <sys/stat.h>

#include <vector>

namespace dtcomm {

// A listening socket, whose number another file may get once it is closed.
struct ListeningSocket {
  int descriptor;
  ino_t inode;

  bool operator==(const ListeningSocket& other) const { return descriptor == other.descriptor && inode == other.inode; }
  bool is_open() const;
};

// All of them; none if there is no descriptor left to list them with.
std::vector<ListeningSocket> listening_sockets();

}  // namespace dtcomm
