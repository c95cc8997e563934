// Lowered programs, as tests/cuda/program_files.py writes them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "engine/program.h"

namespace dtcomm::cuda_emulated {

struct LoweredSchedule {
  int steps = 0;
  std::vector<std::shared_ptr<const Program>> programs;  // by rank
  std::vector<std::vector<int>> step_of;
};

class Programs {
 public:
  explicit Programs(const std::string& file);  // throws std::runtime_error
  const LoweredSchedule& of(const std::string& collective, const std::string& algorithm, int ranks) const;

 private:
  std::map<std::tuple<std::string, std::string, int>, LoweredSchedule> all_;
};

}  // namespace dtcomm::cuda_emulated
