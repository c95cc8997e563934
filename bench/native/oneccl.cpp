// oneCCL's all_reduce on CPUs, for bench.collectives. Linked with the static library for CPUs of the package
// oneccl-devel, which leaves the hooks of Intel's tracing (ITT) to the program; null means that nothing is traced.
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <memory>
#include <oneapi/ccl.hpp>
#include <string>

#define ITT_HOOK(name) void* __itt_##name##_ptr__3_0 = nullptr

extern "C" {

ITT_HOOK(domain_create);
ITT_HOOK(event_create);
ITT_HOOK(event_end);
ITT_HOOK(event_start);
ITT_HOOK(metadata_add);
ITT_HOOK(string_handle_create);
ITT_HOOK(task_begin);
ITT_HOOK(task_end);
ITT_HOOK(thread_set_name);

// Connects `ranks` processes, which find each other through `path`: rank 0 creates it. Null if oneCCL refuses; it has
// then printed why.
void* oneccl_open(const char* path, int rank, int ranks) {
  try {
    ccl::init();
    ccl::shared_ptr_class<ccl::kvs> store;
    ccl::kvs::address_type address;
    if (rank == 0) {
      store = ccl::create_main_kvs();
      address = store->get_address();
      const std::string unfinished = std::string(path) + ".unfinished";
      std::ofstream(unfinished, std::ios::binary).write(reinterpret_cast<const char*>(address.data()), address.size());
      if (std::rename(unfinished.c_str(), path) != 0) return nullptr;
    } else {
      while (access(path, R_OK) != 0) usleep(1000);
      std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(address.data()), address.size());
      store = ccl::create_kvs(address);
    }
    return new ccl::communicator(ccl::create_communicator(ranks, rank, store));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oneCCL: %s\n", error.what());
    return nullptr;
  }
}

// Sums n elements at x in place `calls` times; x holds floats, or bfloat16 if `bf16`. Returns the seconds.
double oneccl_all_reduce(void* handle, void* x, std::size_t n, int bf16, int calls) {
  const auto& communicator = *static_cast<const ccl::communicator*>(handle);
  const auto type = bf16 ? ccl::datatype::bfloat16 : ccl::datatype::float32;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) ccl::allreduce(x, x, n, type, ccl::reduction::sum, communicator).wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // extern "C"
