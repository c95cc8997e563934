// The flight recorder: the last operations of a communicator and how far they got. Its owner (OperationQueue) calls it
// under a lock that it holds at those moments anyway.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/plan.h"

namespace dtcomm {

constexpr std::size_t kFlightRecords = 256;  // operations kept
constexpr std::size_t kWaitedWords = 4;      // of 64 ranks each: waits for later ranks are not recorded
enum class Stage : std::uint8_t { issued = 0, started = 1, done = 2, failed = 3 };

struct FlightRecord {
  std::uint64_t number = 0;  // 0: unused
  std::shared_ptr<const Plan> plan;
  std::uint64_t issued_ns = 0;
  std::uint64_t started_ns = 0;
  std::uint64_t finished_ns = 0;
  Stage stage = Stage::issued;
  int waiting_for = -1;                              // the last rank that it waited for
  std::array<std::uint64_t, kWaitedWords> waited{};  // a bit for each rank that it waited for until it went to sleep

  std::vector<int> waited_for() const;
};

class FlightRecorder {
 public:
  void issue(std::uint64_t number, const std::shared_ptr<const Plan>& plan, std::uint64_t now) {
    FlightRecord& record = at(number);
    record.number = number;
    record.plan = plan;
    record.issued_ns = now;
    record.started_ns = record.finished_ns = 0;
    record.stage = Stage::issued;
    record.waiting_for = -1;
    record.waited = {};
  }
  void start(std::uint64_t number, std::uint64_t now) {
    if (FlightRecord* record = find(number)) {
      record->started_ns = now;
      record->stage = Stage::started;
    }
  }
  void wait(std::uint64_t number, int peer);
  void finish(std::uint64_t number, bool failed, std::uint64_t now) {
    if (FlightRecord* record = find(number)) {
      record->finished_ns = now;
      record->stage = failed ? Stage::failed : Stage::done;
    }
  }
  // Oldest first.
  std::vector<FlightRecord> list() const;

 private:
  FlightRecord& at(std::uint64_t number) { return ring_[number % kFlightRecords]; }
  FlightRecord* find(std::uint64_t number) {
    FlightRecord& record = at(number);
    return record.number == number ? &record : nullptr;
  }
  std::vector<FlightRecord> ring_ = std::vector<FlightRecord>(kFlightRecords);
};

}  // namespace dtcomm
