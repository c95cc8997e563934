// Descriptions of races. Source lines come from addr2line, if it is installed; otherwise a site is an offset in the
// program.
#include <dlfcn.h>

#include <cstdio>
#include <sstream>

#include "tests/race_detector/detector.h"

namespace dtcomm::race_detector {

namespace {

std::string last_part(const std::string& path) {
  const std::size_t at = path.find("csrc/");
  return at == std::string::npos ? path : path.substr(at);
}

}  // namespace

std::string describe_site(const void* site) {
  Dl_info program;
  if (!dladdr(site, &program)) return "an unknown site";
  const auto at = reinterpret_cast<std::uintptr_t>(site) - reinterpret_cast<std::uintptr_t>(program.dli_fbase) - 1;
  char command[600];
  std::snprintf(command, sizeof command, "addr2line -e '%s' -i 0x%zx 2>/dev/null", program.dli_fname, at);
  std::string lines;
  if (std::FILE* pipe = popen(command, "r")) {
    char line[500];
    for (int deep = 0; deep < 4 && std::fgets(line, sizeof line, pipe); ++deep) {
      std::istringstream words(line);
      std::string location;
      words >> location;
      lines += (deep ? " in " : "") + last_part(location);
    }
    pclose(pipe);
  }
  if (!lines.empty()) return lines;
  std::snprintf(command, sizeof command, "%s+0x%zx", program.dli_fname, at);
  return command;
}

std::string Detector::name(unsigned lane) const {
  const unsigned block = lane / shape_.threads;
  return "rank " + std::to_string(block / shape_.blocks) + " block " + std::to_string(block % shape_.blocks) +
         " lane " + std::to_string(lane % shape_.threads);
}

std::string Detector::describe(const Race& race) const {
  const auto side = [&](const Access& access) {
    return name(access.lane) + (access.strong ? " strongly" : "") + (access.stores ? " stores" : " loads") + " at " +
           describe_site(access.site);
  };
  if (*race.what) return std::string(race.what) + " (" + race.where + "): " + side(race.later);
  return "race in " + race.where + ":\n    " + side(race.earlier) + "\n    " + side(race.later);
}

}  // namespace dtcomm::race_detector
