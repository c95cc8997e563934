// The inputs that tests/cuda/emulator_inputs.py writes into a folder: lowered programs and codecs.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "codec/codec.h"
#include "engine/program.h"

namespace dtcomm::cuda_emulated {

using RankPrograms = std::vector<std::shared_ptr<const Program>>;

class Programs {
 public:
  // Reads programs.txt of a folder; throws std::runtime_error.
  explicit Programs(const std::string& folder);
  const RankPrograms& of(const std::string& collective, const std::string& algorithm, int ranks) const;

 private:
  std::map<std::tuple<std::string, std::string, int>, RankPrograms> all_;
};

// The codecs of codecs.txt of a folder: those of the registry that have CUDA kernels, with options such that every
// kernel is used. Throws std::runtime_error.
std::vector<Codec> read_codecs(const std::string& folder);

}  // namespace dtcomm::cuda_emulated
