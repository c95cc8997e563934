// Descriptors that forked children must not keep.
#pragma once

namespace dtcomm {

// Closes `fd` in every child that this process forks: a copy there would keep a connection or memory in use after this
// process has closed it or ended.
void close_in_children(int fd);
// Closes a descriptor that was given to close_in_children. Does nothing in such a child, in which the number may belong
// to another file by now.
void close_unless_in_child(int fd);

}  // namespace dtcomm
