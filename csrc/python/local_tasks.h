// A task of an operation (engine/interpreter.h) as a value that Python makes, runs by itself or hands to the engine.
#pragma once

#include "engine/interpreter.h"

namespace dtcomm::python {

// Keeps no memory: whoever makes one holds the tensors.
struct NativeTask {
  Task run;
  Arrival arrival = {};  // the same, piece by piece, where the engine can tell when an element is final
};

}  // namespace dtcomm::python
