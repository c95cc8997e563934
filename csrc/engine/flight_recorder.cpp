#include "engine/flight_recorder.h"

#include <algorithm>

namespace dtcomm {

std::vector<int> FlightRecord::waited_for() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < kWaitedWords * 64; ++rank) {
    if (waited[rank / 64] >> (rank % 64) & 1) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void FlightRecorder::wait(std::uint64_t number, int peer) {
  FlightRecord* record = find(number);
  if (!record || peer < 0) return;
  record->waiting_for = peer;
  const auto bit = static_cast<std::size_t>(peer);
  if (bit < kWaitedWords * 64) record->waited[bit / 64] |= std::uint64_t{1} << (bit % 64);
}

std::vector<FlightRecord> FlightRecorder::list() const {
  std::vector<FlightRecord> records;
  for (const FlightRecord& record : ring_) {
    if (record.number != 0) records.push_back(record);
  }
  std::sort(records.begin(), records.end(),
            [](const FlightRecord& a, const FlightRecord& b) { return a.number < b.number; });
  return records;
}

}  // namespace dtcomm
