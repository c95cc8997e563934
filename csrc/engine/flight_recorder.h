// The flight recorder: what the last operations of a communicator were and how far they came. Written under its
// communicator's lock, at moments when that is held anyway.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/plan.h"

namespace dtcomm {

constexpr std::size_t kFlights = 256;    // operations kept
constexpr std::size_t kWaitedWords = 4;  // 64 ranks each: of the others no wait is noted
enum class Stage : std::uint8_t { issued = 0, started = 1, done = 2, failed = 3 };

struct Flight {
  std::uint64_t number = 0;  // 0: unused
  std::shared_ptr<const Plan> plan;
  std::uint64_t issued_ns = 0;
  std::uint64_t started_ns = 0;
  std::uint64_t finished_ns = 0;
  Stage stage = Stage::issued;
  int waiting_for = -1;                              // the rank waited for last
  std::array<std::uint64_t, kWaitedWords> waited{};  // every rank waited for so long that this one went to sleep

  std::vector<int> waited_for() const;
};

class FlightRing {
 public:
  void issue(std::uint64_t number, const std::shared_ptr<const Plan>& plan, std::uint64_t now) {
    Flight& flight = at(number);
    flight.number = number;
    flight.plan = plan;
    flight.issued_ns = now;
    flight.started_ns = flight.finished_ns = 0;
    flight.stage = Stage::issued;
    flight.waiting_for = -1;
    flight.waited = {};
  }
  void start(std::uint64_t number, std::uint64_t now) {
    if (Flight* flight = find(number)) {
      flight->started_ns = now;
      flight->stage = Stage::started;
    }
  }
  void wait(std::uint64_t number, int peer);
  void finish(std::uint64_t number, bool failed, std::uint64_t now) {
    if (Flight* flight = find(number)) {
      flight->finished_ns = now;
      flight->stage = failed ? Stage::failed : Stage::done;
    }
  }
  // Oldest first.
  std::vector<Flight> list() const;

 private:
  Flight& at(std::uint64_t number) { return ring_[number % kFlights]; }
  Flight* find(std::uint64_t number) {
    Flight& flight = at(number);
    return flight.number == number ? &flight : nullptr;
  }
  std::vector<Flight> ring_ = std::vector<Flight>(kFlights);
};

}  // namespace dtcomm
