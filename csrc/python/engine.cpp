#include "python/bind.h"

namespace dtcomm::python {

void bind_engine(pybind11::module_&) {}

}  // namespace dtcomm::python
