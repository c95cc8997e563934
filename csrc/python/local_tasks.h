// A local task of an operation as a Python object: Python makes it, and runs it or passes it to the engine.
#pragma once

#include "engine/call.h"

namespace dtcomm::python {

// Holds addresses only: its maker keeps the tensors alive.
struct NativeTask {
  LocalTask run;
  EpilogueHook epilogue = {};  // the same work, piece by piece, if the engine can tell when an element is final
};

}  // namespace dtcomm::python
