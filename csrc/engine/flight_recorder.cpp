#include "engine/flight_recorder.h"

#include <algorithm>

namespace dtcomm {

std::vector<int> Flight::waited_for() const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < kWaitedWords * 64; ++rank) {
    if (waited[rank / 64] >> (rank % 64) & 1) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void FlightRing::wait(std::uint64_t number, int peer) {
  Flight* flight = find(number);
  if (!flight || peer < 0) return;
  flight->waiting_for = peer;
  const auto bit = static_cast<std::size_t>(peer);
  if (bit < kWaitedWords * 64) flight->waited[bit / 64] |= std::uint64_t{1} << (bit % 64);
}

std::vector<Flight> FlightRing::list() const {
  std::vector<Flight> flights;
  for (const Flight& flight : ring_) {
    if (flight.number != 0) flights.push_back(flight);
  }
  std::sort(flights.begin(), flights.end(), [](const Flight& a, const Flight& b) { return a.number < b.number; });
  return flights;
}

}  // namespace dtcomm
