// Two processes run collectives over shared memory, and one of them is killed in the end. Prints digests of the
// results, equal on all processors, to the standard output, and what the kernel offers to the standard error output: an
// emulator of another processor lacks some system calls, and the engine does without them.
//
//   engine_processes NAME    with the kernel of that name
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "engine/communicator.h"
#include "tests/tsan_cases.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::tests;

constexpr int kRanks = 2;
constexpr int kOperations = 24;
constexpr int kVictim = 1;

void report_call(const char* name, bool offered) {
  std::fprintf(stderr, "engine_processes: %s %s\n", name, offered ? "is offered" : "is not offered (ENOSYS)");
}

// A call with arguments that are refused, if it exists, with another error.
void report_system_calls() {
  const auto exists = [](long number, long first) {
    errno = 0;
    return syscall(number, first, nullptr, 0, nullptr, 0, 0) >= 0 || errno != ENOSYS;
  };
  report_call("pidfd_open", exists(SYS_pidfd_open, -1));
  report_call("process_vm_readv", exists(SYS_process_vm_readv, getpid()));
  report_call("membarrier", exists(SYS_membarrier, 0));
}

// The numbers of PeerAddress, as a process sends them to another one.
struct Numbers {
  int pid, page_fd, region_fd;
  std::uint64_t page_token, page_address, region_token;
};

PeerAddress exchange(const PeerAddress& own, int channel, int peer) {
  Numbers numbers{own.pid, own.page_fd, own.region_fd, own.page_token, own.page_address, own.region_token};
  if (write(channel, &numbers, sizeof numbers) != static_cast<ssize_t>(sizeof numbers)) fail("write an address");
  if (read(channel, &numbers, sizeof numbers) != static_cast<ssize_t>(sizeof numbers)) fail("read an address");
  PeerAddress address;
  address.pid = numbers.pid;
  address.page_fd = numbers.page_fd;
  address.region_fd = numbers.region_fd;
  address.page_token = numbers.page_token;
  address.page_address = numbers.page_address;
  address.region_token = numbers.region_token;
  address.name = "rank " + std::to_string(peer);
  return address;
}

std::uint64_t digest(const std::vector<float>& values, std::uint64_t hash) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

// Every value is within one part in fifty of the largest one, which int8 keeps to with two roundings.
void check_close(const std::vector<float>& got, const std::vector<float>& expected) {
  float largest = 0;
  for (const float value : expected) largest = std::max(largest, std::fabs(value));
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - expected[i]) <= largest / 50)) fail("int8, element " + std::to_string(i));
  }
}

// All operations with one codec; the digest of this rank's results.
std::uint64_t run_operations(Communicator& communicator, int rank, const Kernels& kernels, const Codec& codec,
                             bool single_copy) {
  const bool lossy = codec.family != Family::none;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (int operation = 0; operation < kOperations; ++operation) {
    // The ranks take turns to come late, and the other one sleeps until it is woken.
    if (operation % 8 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::vector<float> tensor = input(rank, operation), output;
    Call call = operation % 2 ? all_gather_call(rank, kRanks, tensor, output, single_copy && !lossy, codec)
                              : all_reduce_call(rank, kRanks, tensor, codec);
    call.kernels = &kernels;
    if (operation % 3) {
      communicator.run(std::move(call));
    } else {
      communicator.wait(communicator.submit(std::move(call)));
    }
    if (operation % 2) {
      std::vector<float> expected;
      for (int peer = 0; peer < kRanks; ++peer) {
        const std::vector<float> part = input(peer, operation);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      lossy ? check_close(output, expected) : check_all_gather(tensor, output, kRanks, operation);
      hash = digest(output, hash);
    } else {
      std::vector<float> expected = input(0, operation);
      const std::vector<float> other = input(1, operation);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += other[i];
      lossy ? check_close(tensor, expected) : check_all_reduce(tensor, kRanks, operation);
      hash = digest(tensor, hash);
    }
  }
  return hash;
}

// The victim is killed while the other rank sleeps in a collective.
void lose_a_peer(Communicator& communicator, int rank) {
  if (rank == kVictim) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    std::raise(SIGKILL);
  }
  std::vector<float> tensor = input(rank, 5);
  const auto started = std::chrono::steady_clock::now();
  try {
    communicator.run(all_reduce_call(rank, kRanks, tensor));
  } catch (const Error& error) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
    if (error.kind() != ErrorKind::peer_lost || error.failed_rank() != kVictim) fail(error.what());
    std::fprintf(stderr, "engine_processes: after %.2f s: %s\n", elapsed.count(), error.what());
    if (elapsed.count() > 10) fail("the end of a peer was noticed late");
    std::puts("killed peer: noticed");
    return;
  }
  fail("an operation with a killed peer ended");
}

void run_rank(int rank, int channel, const Kernels& kernels) {
  CommunicatorOptions options;
  options.peers.rank = rank;
  options.peers.ranks = kRanks;
  options.peers.max_boxes = kRanks;
  options.peers.slot_bytes = kSlotBytes;
  options.timeout_ns = 60ull * 1000 * 1000 * 1000;
  Communicator communicator(options);
  std::vector<PeerAddress> addresses(kRanks);
  const int peer = 1 - rank;
  addresses[static_cast<std::size_t>(rank)] = communicator.address();
  addresses[static_cast<std::size_t>(rank)].name = "rank " + std::to_string(rank);
  addresses[static_cast<std::size_t>(peer)] = exchange(communicator.address(), channel, peer);
  communicator.attach(addresses);

  // Both ranks have to choose alike.
  const Status can_copy = communicator.can_single_copy();
  const char mine = can_copy.ok();
  char theirs = 0;
  if (write(channel, &mine, 1) != 1 || read(channel, &theirs, 1) != 1) fail("exchange whether single copy works");
  const bool single_copy = mine && theirs;
  if (rank == 0 && single_copy) std::fprintf(stderr, "engine_processes: all_gather copies out of private memory\n");
  if (rank == 0 && !single_copy) {
    std::fprintf(stderr, "engine_processes: all_gather goes through the slots: %s\n",
                 can_copy.ok() ? "the peer cannot read this rank's memory" : can_copy.message().c_str());
  }

  Codec int8;
  int8.family = Family::integer;
  int8.bits = 8;
  int8.block = 32;
  for (const Codec& codec : {Codec{}, int8}) {
    const std::uint64_t result = run_operations(communicator, rank, kernels, codec, single_copy);
    std::uint64_t other = 0;
    if (write(channel, &result, sizeof result) != sizeof result) fail("write a digest");
    if (read(channel, &other, sizeof other) != sizeof other) fail("read a digest");
    if (result != other) fail("the ranks have different results");
    if (rank == 0) std::printf("%s: %016" PRIx64 "\n", codec.family == Family::none ? "none" : "int8", result);
  }
  if (!single_copy != (communicator.single_copy_bytes() == 0)) fail("all_gather took the other path");
  lose_a_peer(communicator, rank);
}

}  // namespace

int main(int count, char** arguments) {
  const Kernels* const kernels = find_kernels(count > 1 ? arguments[1] : "generic");
  if (!kernels) fail("this CPU has no kernel of that name");
  report_system_calls();
  int channel[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel) != 0) fail("socketpair");
  pid_t children[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    children[rank] = fork();
    if (children[rank] < 0) fail("fork");
    if (children[rank] > 0) continue;
    close(channel[1 - rank]);
    try {
      run_rank(rank, channel[rank], *kernels);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank) + ": " + error.what());
    }
    std::fflush(stdout);
    _exit(0);
  }
  close(channel[0]);
  close(channel[1]);
  int ends[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) waitpid(children[rank], &ends[rank], 0);
  if (!WIFEXITED(ends[0]) || WEXITSTATUS(ends[0]) != 0) fail("rank 0 failed");
  if (!WIFSIGNALED(ends[kVictim]) || WTERMSIG(ends[kVictim]) != SIGKILL) fail("rank 1 was not killed");
  return 0;
}
