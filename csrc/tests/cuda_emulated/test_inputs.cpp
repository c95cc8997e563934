#include "tests/cuda_emulated/test_inputs.h"

#include <cstring>
#include <fstream>
#include <stdexcept>

#include "codec/validate.h"

namespace dtcomm::cuda_emulated {

namespace {

template <class T>
std::vector<T> numbers(std::istream& from, std::size_t count) {
  std::vector<T> all(count);
  for (T& number : all) from >> number;
  return all;
}

}  // namespace

Programs::Programs(const std::string& folder) {
  const std::string file = folder + "/programs.txt";
  std::ifstream from(file);
  std::string collective, algorithm;
  int ranks, chunks;
  while (from >> collective >> algorithm >> ranks >> chunks) {
    RankPrograms& programs = all_[{collective, algorithm, ranks}];
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<int> boxes = numbers<int>(from, static_cast<std::size_t>(ranks));
      std::size_t count = 0;
      from >> count;
      const auto flat = numbers<std::int64_t>(from, count);
      programs.push_back(std::make_shared<const Program>(Program::parse(rank, ranks, chunks, std::move(boxes), flat)));
    }
  }
  if (all_.empty() || !from.eof()) throw std::runtime_error(file + " holds no programs");
}

const RankPrograms& Programs::of(const std::string& collective, const std::string& algorithm, int ranks) const {
  const auto found = all_.find({collective, algorithm, ranks});
  if (found == all_.end()) throw std::runtime_error("no program of " + collective + ", " + algorithm);
  return found->second;
}

std::vector<Codec> read_codecs(const std::string& folder) {
  const std::string file = folder + "/codecs.txt";
  std::ifstream from(file);
  std::vector<Codec> codecs;
  std::string digits;
  while (from >> digits) {
    std::uint8_t bytes[sizeof(Codec)] = {};
    if (digits.size() != 2 * sizeof bytes) throw std::runtime_error(file + ": not a codec: " + digits);
    for (std::size_t i = 0; i < sizeof bytes; ++i) {
      bytes[i] = static_cast<std::uint8_t>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
    }
    Codec codec;
    std::memcpy(&codec, bytes, sizeof codec);
    throw_if_invalid(check_codec(codec));
    codecs.push_back(codec);
  }
  if (codecs.empty()) throw std::runtime_error(file + " holds no codecs");
  return codecs;
}

}  // namespace dtcomm::cuda_emulated
