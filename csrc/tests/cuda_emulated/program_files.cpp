#include "tests/cuda_emulated/program_files.h"

#include <fstream>
#include <stdexcept>

namespace dtcomm::cuda_emulated {

namespace {

template <class T>
std::vector<T> numbers(std::istream& from, std::size_t count) {
  std::vector<T> all(count);
  for (T& each : all) from >> each;
  return all;
}

}  // namespace

Programs::Programs(const std::string& file) {
  std::ifstream from(file);
  std::string collective, algorithm;
  int ranks, chunks, steps;
  while (from >> collective >> algorithm >> ranks >> chunks >> steps) {
    LoweredSchedule lowering;
    lowering.steps = steps;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<int> boxes = numbers<int>(from, static_cast<std::size_t>(ranks));
      std::size_t count = 0;
      from >> count;
      const auto flat = numbers<std::int64_t>(from, count);
      from >> count;
      lowering.step_of.push_back(numbers<int>(from, count));
      lowering.programs.push_back(
          std::make_shared<const Program>(Program::parse(rank, ranks, chunks, std::move(boxes), flat)));
    }
    all_[{collective, algorithm, ranks}] = std::move(lowering);
  }
  if (all_.empty() || !from.eof()) throw std::runtime_error(file + " holds no programs");
}

const LoweredSchedule& Programs::of(const std::string& collective, const std::string& algorithm, int ranks) const {
  const auto found = all_.find({collective, algorithm, ranks});
  if (found == all_.end()) throw std::runtime_error("no program of " + collective + ", " + algorithm);
  return found->second;
}

}  // namespace dtcomm::cuda_emulated
