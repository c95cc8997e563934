#include "net/ucx_devices.h"

#include <algorithm>
#include <sstream>

namespace dtcomm {

// Lanes have the number of the resource before them, and of the path behind them: "1:tcp/eth0.0".
std::vector<std::string> resources(const std::string& text, const char* mark) {
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find(mark);
    if (at == std::string::npos) continue;
    std::istringstream words(line.substr(at));
    for (std::string word; words >> word;) {
      if (word.find('/') == std::string::npos) continue;
      if (word.find(':') < word.find('/')) {
        word.erase(0, word.find(':') + 1);
        word.erase(word.rfind('.'));
      }
      if (std::find(found.begin(), found.end(), word) == found.end()) found.push_back(word);
      break;
    }
  }
  return found;
}

bool is_memory(const std::string& device) {
  const std::string transport = device.substr(0, device.find('/'));
  for (const char* const name : {"self", "sysv", "posix", "cma", "knem", "xpmem"}) {
    if (transport == name) return true;
  }
  return false;
}

}  // namespace dtcomm
