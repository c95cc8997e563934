// The engine with one thread per rank, for ThreadSanitizer. Interpreters run over shared regions at the same addresses,
// so that the sanitizer sees every pair of accesses; communicators run with callers, queues and the progress thread.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"
#include "engine/progress_thread.h"
#include "engine/thread_pool.h"
#include "tests/tsan_cases.h"

namespace {

using namespace dtcomm;
using namespace dtcomm::tests;

constexpr int kOperations = 40;
constexpr int kTunedOperations = 200;  // in which the tuner decides twice

void run_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

class ThreadTransport final : public Transport {
 public:
  void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) override {
    BoxFlag& flag = own().flags[index];
    flag.operation.store(operation, std::memory_order_relaxed);
    flag.checksum.store(checksum, std::memory_order_relaxed);
    flag.seq.store(seq, std::memory_order_release);
  }
  void publish_pieces_done(std::uint64_t pieces) override {
    own().pieces_done->store(pieces, std::memory_order_release);
  }
  std::uint8_t* map_tensor(int, const SharedTensorLocation&, std::size_t) override { std::abort(); }
  void read_memory(int, std::uint64_t address, std::uint8_t* out, std::size_t bytes) override {
    std::memcpy(out, reinterpret_cast<const std::uint8_t*>(address), bytes);
  }
};

void interpreters_over_shared_regions(int ranks) {
  std::vector<PeerView> views;
  std::vector<void*> regions;
  for (int rank = 0; rank < ranks; ++rank) {
    const RegionLayout layout{static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(ranks),
                              static_cast<std::uint32_t>(ranks), kSlotBytes};
    regions.push_back(::operator new(layout.bytes(), std::align_val_t{kPage}));
    views.push_back(construct_region(regions.back(), layout));
  }
  run_threads(ranks, [&](int rank) {
    ThreadTransport transport;
    transport.rank = rank;
    transport.ranks = ranks;
    transport.peers = views;
    Tuner tuner(transport);
    transport.tuner = &tuner;
    for (int operation = 0; operation < kTunedOperations; ++operation) {
      std::vector<float> tensor = input(rank, operation);
      std::vector<float> output;
      const bool single_copy = operation % 3 == 2;
      Call call =
          single_copy ? all_gather_call(rank, ranks, tensor, output) : all_reduce_call(rank, ranks, tensor, {}, true);
      const auto number = static_cast<std::uint64_t>(operation) + 1;
      const std::uint64_t fingerprint = announce(*transport.own().header, call, number);
      Interpreter interpreter(transport, std::move(call), fingerprint, number);
      while (interpreter.advance() != Progress::done) {
        if (interpreter.mismatch()) fail("mismatch");
        std::this_thread::yield();
      }
      single_copy ? check_all_gather(tensor, output, ranks, operation) : check_all_reduce(tensor, ranks, operation);
    }
  });
  for (void* region : regions) ::operator delete(region, std::align_val_t{kPage});
}

// Offers that receivers take while senders withdraw them.
void offers_over_shared_regions() {
  std::vector<PeerView> views;
  std::vector<void*> regions;
  for (int rank = 0; rank < 2; ++rank) {
    const RegionLayout layout{static_cast<std::uint32_t>(rank), 2, 1, kSlotBytes};
    regions.push_back(::operator new(layout.bytes(), std::align_val_t{kPage}));
    views.push_back(construct_region(regions.back(), layout));
  }
  run_threads(2, [&](int rank) {
    ThreadTransport transport;
    transport.rank = rank;
    transport.ranks = 2;
    transport.peers = views;
    for (int operation = 0; operation < 10 * kTunedOperations; ++operation) {
      std::vector<float> tensor = input(0, operation);
      if (rank == 1) std::fill(tensor.begin(), tensor.end(), -1.0f);
      const auto number = static_cast<std::uint64_t>(operation) + 1;
      Call call = message_call(rank, tensor);
      const std::uint64_t fingerprint = announce(*transport.own().header, call, number);
      Interpreter interpreter(transport, std::move(call), fingerprint, number);
      int polls = 0;
      while (interpreter.advance() != Progress::done) {
        if (interpreter.mismatch()) fail("mismatch");
        if (++polls > operation % 5) interpreter.end_offer();
        if (operation % 3 == 0) std::this_thread::yield();
      }
      if (rank == 1 && tensor != input(0, operation)) fail("message " + std::to_string(operation));
      std::fill(tensor.begin(), tensor.end(), -2.0f);  // the receiver must not read it any more
    }
  });
  for (void* region : regions) ::operator delete(region, std::align_val_t{kPage});
}

using Group = std::vector<std::unique_ptr<Communicator>>;

// Two ends of a TCP connection.
void connect_pair(int (&ends)[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof loopback;
  auto* const address = reinterpret_cast<sockaddr*>(&loopback);
  if (listener < 0 || bind(listener, address, size) != 0 || listen(listener, 1) != 0) fail("listen");
  if (getsockname(listener, address, &size) != 0) fail("getsockname");
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (ends[0] < 0 || connect(ends[0], address, size) != 0) fail("connect");
  ends[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (ends[1] < 0) fail("accept");
  close(listener);
}

// both: every second rank is reached over a socket; several: payloads go over two sockets of three.
enum class Reach { memory, sockets, both, several };

Group group_of(int ranks, Reach reach = Reach::memory, std::size_t slot_bytes = kSlotBytes) {
  Group group;
  std::vector<PeerAddress> addresses;
  for (int rank = 0; rank < ranks; ++rank) {
    CommunicatorOptions options;
    options.peers.rank = rank;
    options.peers.ranks = ranks;
    options.peers.max_boxes = static_cast<std::uint32_t>(ranks);
    options.peers.slot_bytes = slot_bytes;
    options.timeout_ns = 60ull * 1000 * 1000 * 1000;
    group.push_back(std::make_unique<Communicator>(options));
    group.back()->waiters_help_progress = rank % 2 == 1;
    addresses.push_back(group.back()->address());
    addresses.back().name = "rank " + std::to_string(rank);
  }
  std::vector<std::vector<PeerAddress>> seen(addresses.size(), addresses);  // by the rank that attaches
  for (std::size_t low = 0; low < addresses.size(); ++low) {
    for (std::size_t high = low + 1; high < addresses.size(); ++high) {
      if (reach == Reach::memory || (reach == Reach::both && (high - low) % 2 == 0)) continue;
      int ends[2];
      connect_pair(ends);
      seen[low][high].sockets = {ends[0]};
      seen[high][low].sockets = {ends[1]};
      for (int further = 0; reach == Reach::several && further < 2; ++further) {
        connect_pair(ends);
        seen[low][high].sockets.push_back(ends[0]);
        seen[high][low].sockets.push_back(ends[1]);
      }
    }
  }
  for (std::size_t rank = 0; rank < group.size(); ++rank) group[rank]->attach(seen[rank]);
  return group;
}

// Small queued calls are run by the thread that queues them, while the progress thread uses the same queue.
void run_by_the_caller(int ranks, Reach reach, int calls) {
  Group group = group_of(ranks, reach);
  run_threads(ranks, [&](int rank) {
    Communicator& communicator = *group[static_cast<std::size_t>(rank)];
    for (int operation = 0; operation < calls; ++operation) {
      std::vector<float> tensor(16, static_cast<float>(rank));
      const auto work = communicator.submit(all_reduce_call(rank, ranks, tensor));
      if (operation % 3) work->wait();
      std::vector<float> second(16, static_cast<float>(rank));
      const auto last = communicator.submit(all_reduce_call(rank, ranks, second));
      operation % 2 ? communicator.wait(last) : last->wait();  // runs it, or leaves it to the progress thread
      const auto sum = static_cast<float>(ranks * (ranks - 1) / 2);
      if (tensor[7] != sum || second[7] != sum) fail("small operation " + std::to_string(operation));
    }
  });
  for (auto& communicator : group) communicator->close();
  ProgressThread::instance().stop();
}

// Queued and inline calls from two threads per rank, over one communicator per thread.
void communicators(int ranks, Reach reach, int operations) {
  constexpr int kGroups = 2;
  std::vector<Group> all;
  for (int group = 0; group < kGroups; ++group) all.push_back(group_of(ranks, reach));
  run_threads(ranks * kGroups, [&](int thread) {
    const int rank = thread / kGroups;
    Communicator& communicator = *all[static_cast<std::size_t>(thread % kGroups)][static_cast<std::size_t>(rank)];
    for (int operation = 0; operation < operations; operation += 4) {
      std::vector<std::vector<float>> tensors;
      for (int i = 0; i < 4; ++i) tensors.push_back(input(rank, operation + i));
      std::vector<std::shared_ptr<Work>> works;
      for (int i = 0; i < 3; ++i) {
        works.push_back(communicator.submit(all_reduce_call(rank, ranks, tensors[static_cast<std::size_t>(i)])));
      }
      communicator.run(all_reduce_call(rank, ranks, tensors[3]));
      for (const auto& work : works) work->wait();
      for (int i = 0; i < 4; ++i) check_all_reduce(tensors[static_cast<std::size_t>(i)], ranks, operation + i);
    }
  });
  for (auto& group : all) {
    for (auto& communicator : group) communicator->close();
  }
  ProgressThread::instance().stop();
}

// Two threads wait for different operations of one communicator, the later one first: one of them runs both, and the
// other learns of the end of its operation at once.
void waited_by_two(int ranks) {
  Group group = group_of(ranks);
  run_threads(ranks, [&](int rank) {
    Communicator& communicator = *group[static_cast<std::size_t>(rank)];
    for (int operation = 0; operation < kOperations; operation += 2) {
      std::vector<float> first = input(rank, operation);
      std::vector<float> second = input(rank, operation + 1);
      std::vector<float> output;
      const auto first_work = communicator.submit(all_gather_call(rank, ranks, first, output));
      const auto second_work = communicator.submit(all_reduce_call(rank, ranks, second));
      std::thread other([&] { communicator.wait(second_work); });
      communicator.wait(first_work);
      check_all_gather(first, output, ranks, operation);
      other.join();
      check_all_reduce(second, ranks, operation + 1);
    }
  });
  for (auto& communicator : group) communicator->close();
  ProgressThread::instance().stop();
}

// Closing a communicator ends the operation that another thread waits for with an error.
void closed_under_a_waiter() {
  for (const bool queued : {false, true}) {
    Group group = group_of(2);
    std::vector<float> tensor = input(0, 3);
    bool refused = false;
    std::thread waiter([&] {
      try {
        Call call = all_reduce_call(0, 2, tensor);
        if (queued) {
          group[0]->wait(group[0]->submit(std::move(call)));
        } else {
          group[0]->run(std::move(call));
        }
      } catch (const ClosedError&) {
        refused = true;
      }
    });
    while (group[0]->flight_records().empty()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    group[0]->close();
    waiter.join();
    if (!refused) fail("a waiter survived its communicator");
    group[1]->close();
  }
  ProgressThread::instance().stop();
}

// Threads that wait for queued operations end with an error when another thread closes the communicator, and no longer
// touch its connections.
void closed_under_two_waiters(Reach reach) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Group group = group_of(2, reach);
    std::vector<float> tensors[2] = {input(0, 3), input(0, 4)};
    std::vector<std::shared_ptr<Work>> works;
    for (std::vector<float>& tensor : tensors) works.push_back(group[0]->submit(all_reduce_call(0, 2, tensor)));
    std::vector<std::thread> waiters;
    for (const auto& work : works) {
      waiters.emplace_back([&group, &work] {
        try {
          group[0]->wait(work);
          fail("an operation survived its communicator");
        } catch (const ClosedError&) {
        }
      });
    }
    group[0]->close();
    for (std::thread& waiter : waiters) waiter.join();
    group[1]->close();
  }
  ProgressThread::instance().stop();
}

// Threads wake the progress thread while another one ends it: every end returns.
void woken_while_stopped() {
  ProgressThread& progress = ProgressThread::instance();
  std::atomic<bool> done{false};
  run_threads(3, [&](int thread) {
    if (thread > 0) {
      while (!done) progress.wake();
      return;
    }
    for (int repeat = 0; repeat < 500; ++repeat) progress.stop();
    done = true;
  });
  progress.stop();
}

// A tensor that its owner has freed is not mapped, even if another one has taken its place.
void freed_tensor_is_not_mapped() {
  LocalProcess& process = LocalProcess::instance();
  PeerProcess peer(static_cast<int>(getpid()), process.fd(), process.page().token,
                   reinterpret_cast<std::uintptr_t>(&process.page()));
  auto tensor = std::make_unique<SharedTensorMemory>(kPage);
  const SharedTensorLocation location = process.find(tensor->data(), kPage);
  const auto refused = [&](const SharedTensorLocation& of) {
    try {
      peer.map_tensor(of, kPage);
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  if (refused(location)) fail("a shared tensor cannot be mapped");
  tensor.reset();
  if (!refused(location) || !refused({location.slot, 0, 0})) fail("a freed tensor was mapped");
  tensor = std::make_unique<SharedTensorMemory>(kPage);
  if (process.find(tensor->data(), kPage).slot != location.slot) fail("the slot was not used again");
  if (!refused(location)) fail("another tensor was mapped in the place of a freed one");
}

// Threads share the pool while another one ends its helpers: every part is called once, and what a part throws reaches
// the thread that asked for it.
void pool_of_several_threads() {
  ThreadPool& pool = ThreadPool::instance();
  std::atomic<bool> done{false};
  run_threads(4, [&](int thread) {
    if (thread == 0) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        pool.stop();
      }
      done = true;
      return;
    }
    for (int repeat = 0; !done; ++repeat) {
      std::vector<int> calls(static_cast<std::size_t>(1 + repeat % 40));
      const std::size_t first_failure = repeat % 3 == 0 ? calls.size() / 2 : calls.size();
      bool thrown = false;
      try {
        pool.run(2 + repeat % 3, calls.size(), [&](std::size_t part) {
          ++calls[part];
          if (part >= first_failure) throw std::runtime_error(std::to_string(part));
        });
      } catch (const std::runtime_error& error) {
        thrown = error.what() == std::to_string(first_failure);
      }
      for (std::size_t part = 0; part < calls.size(); ++part) {
        const bool skipped = thrown && part > first_failure && calls[part] == 0;
        if (calls[part] != 1 && !skipped) fail("a part was not called once");
      }
      if (thrown != (first_failure < calls.size())) fail("a failure was lost");
    }
  });
  pool.stop();
}

// Ranks of one process that use several threads each, so that the pool is often in use by another rank.
void communicators_with_several_threads(int ranks) {
  constexpr std::size_t kElements = 100 * 1000;
  Group group = group_of(ranks, Reach::memory, kParallelSlotBytes);
  run_threads(ranks, [&](int rank) {
    Communicator& communicator = *group[static_cast<std::size_t>(rank)];
    for (int operation = 0; operation < 10; ++operation) {
      std::vector<float> tensor(kElements, static_cast<float>(rank + operation));
      std::vector<float> gathered;
      communicator.run(parallel_call(all_reduce_call(rank, ranks, tensor)));
      const auto sum = static_cast<float>(ranks * (ranks - 1) / 2 + ranks * operation);
      if (tensor.front() != sum || tensor.back() != sum) fail("a sum on several threads");
      for (const bool single_copy : {false, true}) {
        std::fill(tensor.begin(), tensor.end(), static_cast<float>(rank * operation));
        communicator.run(parallel_call(all_gather_call(rank, ranks, tensor, gathered, single_copy)));
        for (int peer = 0; peer < ranks; ++peer) {
          const std::size_t end = kElements * static_cast<std::size_t>(peer + 1);
          if (gathered[end - 1] != static_cast<float>(peer * operation)) fail("a copy on several threads");
        }
      }
    }
  });
  for (auto& communicator : group) communicator->close();
  ProgressThread::instance().stop();
  ThreadPool::instance().stop();
}

// A thread lists the peers, as flight records do, while another one closes the communicator.
void listed_while_closed(Reach reach) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Group group = group_of(2, reach);
    std::atomic<bool> listing{false}, closed{false};
    std::thread reader([&] {
      while (!closed) {
        const std::size_t listed = group[0]->peer_snapshots().size();
        if (listed != 0 && listed != 2) fail("a part of the peers was listed");
        listing = true;
      }
      if (!group[0]->peer_snapshots().empty()) fail("a closed communicator lists peers");
    });
    while (!listing) std::this_thread::yield();
    for (auto& communicator : group) communicator->close();
    closed = true;
    reader.join();
  }
}

}  // namespace

int main() {
  closed_under_a_waiter();
  closed_under_two_waiters(Reach::memory);
  closed_under_two_waiters(Reach::sockets);
  woken_while_stopped();
  freed_tensor_is_not_mapped();
  listed_while_closed(Reach::memory);
  listed_while_closed(Reach::sockets);
  pool_of_several_threads();
  offers_over_shared_regions();
  for (int ranks = 2; ranks <= 4; ++ranks) {
    interpreters_over_shared_regions(ranks);
    communicators_with_several_threads(ranks);
    communicators(ranks, Reach::memory, kOperations);
    run_by_the_caller(ranks, Reach::memory, 2000);
    waited_by_two(ranks);
    for (const Reach reach : {Reach::sockets, Reach::both, Reach::several}) {
      communicators(ranks, reach, kOperations / 4);
      run_by_the_caller(ranks, reach, 100);
    }
    std::printf("%d ranks: ok\n", ranks);
  }
  return 0;
}
