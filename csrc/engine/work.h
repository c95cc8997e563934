// The outcome of one operation, for whoever waits for it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

#include "engine/times.h"

namespace dtcomm {

class Work {
 public:
  // Waits without limit: the operation itself has a deadline. Rethrows its failure.
  void wait();
  bool finished() const;
  std::exception_ptr failure() const;

  // Valid once finished.
  std::uint64_t wire_bytes = 0;
  std::uint64_t started_ns = 0;
  std::uint64_t finished_ns = 0;
  Times times;

  void finish(std::exception_ptr failure);
  // Asks for this work to be handed to Completions::next when it is finished (at once if it is).
  static void notify(const std::shared_ptr<Work>& work, std::uint64_t ticket);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool finished_ = false;
  std::exception_ptr failure_;
  bool notify_ = false;
  std::uint64_t ticket_ = 0;
};

// Finished works whose futures Python has to complete; one Python thread takes them.
class Completions {
 public:
  static Completions& instance();
  void put(std::uint64_t ticket);
  // The next ticket; false after stop().
  bool next(std::uint64_t& ticket);
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::uint64_t> tickets_;
  bool stopped_ = false;
};

}  // namespace dtcomm
