// Binding of build information (compiler, flags), for `dtcomm doctor`.
#include "build_info.h"

#include "python/bindings.h"

namespace dtcomm::python {

void bind_build_info(pybind11::module_& module) {
  module.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["compiler"] = DTCOMM_BUILD_COMPILER;
        info["type"] = DTCOMM_BUILD_TYPE;
        info["flags"] = DTCOMM_BUILD_FLAGS;
        info["sanitize"] = DTCOMM_BUILD_SANITIZE;
        info["processor"] = DTCOMM_BUILD_PROCESSOR;
        return info;
      },
      "How the native core was compiled: compiler, type, flags, sanitize, processor.");
}

}  // namespace dtcomm::python
