#include "engine/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "net/forked_children.h"

namespace dtcomm {
namespace {

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void* map(int fd, std::size_t bytes, ForkedChildren children) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  // A forked child must not write into memory through which its parent talks to peers.
  if (children == ForkedChildren::excluded) madvise(data, bytes, MADV_DONTFORK);
  madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

// A file in memory without a name. Sandboxes and old kernels refuse memfd_create; files in /dev/shm do without it.
int unnamed_file(const char* name) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd >= 0) return fd;
  const int reason = errno;
  const int file = open("/dev/shm", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) errno = reason;
  return file;
}

// Gives an empty file its size and reserves all pages; returns false with errno. Writing does both where ftruncate or
// fallocate is refused.
bool reserve(int fd, std::size_t bytes) {
  if (ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    int code = 0;
    do {
      code = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    } while (code == EINTR);
    if (code == 0) return true;
    errno = code;
  }
  if (errno == ENOSPC || errno == ENOMEM || errno == EFBIG) return false;
  const std::vector<char> zeros(std::min<std::size_t>(bytes, 1 << 20));
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t wrote = pwrite(fd, zeros.data(), std::min(zeros.size(), bytes - done), static_cast<off_t>(done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    done += static_cast<std::size_t>(wrote);
  }
  return true;
}

}  // namespace

MemfdMapping& MemfdMapping::operator=(MemfdMapping&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    fd_ = std::exchange(other.fd_, -1);
    owner_pid_ = other.owner_pid_;
    children_ = other.children_;
  }
  return *this;
}

MemfdMapping MemfdMapping::create(const char* name, std::size_t bytes, ForkedChildren children) {
  MemfdMapping mapping;
  mapping.children_ = children;
  mapping.owner_pid_ = static_cast<int>(getpid());
  mapping.fd_ = unnamed_file(name);
  if (mapping.fd_ < 0) throw_errno("memfd_create");
  if (children == ForkedChildren::excluded) close_in_children(mapping.fd_);
  if (!reserve(mapping.fd_, bytes)) throw_errno("shared memory: reserving " + std::to_string(bytes) + " bytes");
  mapping.data_ = map(mapping.fd_, bytes, children);
  if (!mapping.data_) throw_errno("shared memory: mmap");
  mapping.size_ = bytes;
  return mapping;
}

MemfdMapping MemfdMapping::attach(int pid, int fd, std::size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) throw_errno("opening " + path);
  struct stat info{};
  MemfdMapping mapping;
  mapping.owner_pid_ = static_cast<int>(getpid());
  if (fstat(opened, &info) == 0 && S_ISREG(info.st_mode) && static_cast<std::size_t>(info.st_size) >= bytes) {
    mapping.data_ = map(opened, bytes, mapping.children_);
    mapping.size_ = bytes;
  } else {
    errno = EINVAL;
  }
  const int saved = errno;
  close(opened);
  errno = saved;
  if (!mapping.data_) throw_errno("mapping " + path);
  return mapping;
}

bool MemfdMapping::in_forked_child() const { return owner_pid_ != static_cast<int>(getpid()); }

void MemfdMapping::reset() {
  if (data_ && (children_ == ForkedChildren::inherit || !in_forked_child())) munmap(data_, size_);
  if (children_ == ForkedChildren::excluded) {
    close_unless_in_child(fd_);
  } else if (fd_ >= 0) {
    close(fd_);
  }
  data_ = nullptr;
  size_ = 0;
  fd_ = -1;
}

unsigned long long random_token() {
  unsigned long long token = 0;
  const auto size = static_cast<ssize_t>(sizeof token);
  if (getrandom(&token, sizeof token, 0) != size) {
    const int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);  // where a sandbox refuses the call
    const ssize_t got = fd < 0 ? -1 : read(fd, &token, sizeof token);
    if (fd >= 0) close(fd);
    if (got != size) throw_errno("getrandom");
  }
  return token | 1;  // 0 is what untouched memory holds
}

}  // namespace dtcomm
