// The transports and devices of UCX, which its functions only print: UCX 1.13 has no function that lists them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace dtcomm {

// What a function of UCX that prints to a file prints.
template <class Print>
std::string printed(Print print) {
  char* text = nullptr;
  std::size_t size = 0;
  FILE* const file = open_memstream(&text, &size);
  if (!file) return "";
  print(file);
  std::fclose(file);
  std::string copy(text, size);
  free(text);
  return copy;
}

// The words "transport/device" of the lines that hold `mark`.
std::vector<std::string> resources(const std::string& text, const char* mark);

// Whether this is one of the transports between processes of one host. They do not notice that a peer ends.
bool is_memory(const std::string& device);

}  // namespace dtcomm
