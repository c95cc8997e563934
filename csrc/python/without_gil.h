// Running native code while other Python threads run.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace dtcomm::python {

inline bool interpreter_is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Takes the GIL back, unless the interpreter is being finalized: then the thread, which is a daemon, pauses until the
// process ends, as Python itself does from 3.14 on. Before 3.14 Python ends such a thread with pthread_exit, which
// unwinds the stack, and a destructor or another noexcept function on the way ends the process.
inline void take_gil_back(PyThreadState* state) {
  if (!interpreter_is_finalizing()) {
    try {
      PyEval_RestoreThread(state);
      return;
    } catch (...) {
      // A C function throws nothing: this is the unwinding of pthread_exit, as the finalization began after the look
      // above. It must not go on, and so this handler must not be left.
      for (;;) pause();
    }
  }
  for (;;) pause();
}

// What a thread has let go while it runs native code, and what a handler of an interrupt has raised meanwhile.
struct ReleasedGil {
  PyThreadState* state = nullptr;
  PyObject *raised_type = nullptr, *raised = nullptr, *traceback = nullptr;
};
inline thread_local ReleasedGil released_gil;

// The InterruptCheck of the engine. It takes the GIL, so it is for threads that have waited for a while. The handlers
// of other signals run when the call has ended, as they may call collectives.
inline bool run_interrupt_handler() {
  static thread_local const bool is_main_thread = getpid() == static_cast<pid_t>(syscall(SYS_gettid));
  ReleasedGil& gil = released_gil;
  if (!is_main_thread || !gil.state || gil.raised_type) return gil.raised_type != nullptr;
  take_gil_back(gil.state);
  if (PyOS_InterruptOccurred()) {  // which forgets the interrupt
    PyErr_SetInterrupt();
    if (PyErr_CheckSignals() != 0) PyErr_Fetch(&gil.raised_type, &gil.raised, &gil.traceback);
  }
  gil.state = PyEval_SaveThread();
  return gil.raised_type != nullptr;
}

// Sets what the handler has raised as Python's error, and throws pybind11::error_already_set.
[[noreturn]] inline void throw_raised_by_handler() {
  ReleasedGil& gil = released_gil;
  PyErr_Restore(gil.raised_type, gil.raised, gil.traceback);
  gil.raised_type = gil.raised = gil.traceback = nullptr;
  throw pybind11::error_already_set();
}

// Calls `function` without the GIL and returns what it returns, or throws what it throws, with the GIL. Use it instead
// of py::gil_scoped_release, whose destructor takes the GIL back.
template <class Function>
std::invoke_result_t<Function&> without_gil(Function&& function) {
  using Result = std::invoke_result_t<Function&>;
  // Only the thread that finalizes the interpreter can have the GIL then, and no other thread can use it.
  if (interpreter_is_finalizing()) return function();
  PyThreadState* const state = PyEval_SaveThread();
  PyThreadState* const outer = std::exchange(released_gil.state, state);
  const auto end = [&] {
    released_gil.state = outer;
    take_gil_back(state);
    if (released_gil.raised_type) throw_raised_by_handler();
  };
  std::exception_ptr failure;
  if constexpr (std::is_void_v<Result>) {
    try {
      function();
    } catch (...) {
      failure = std::current_exception();
    }
    end();
    if (failure) std::rethrow_exception(std::move(failure));
  } else {
    std::optional<Result> result;
    try {
      result.emplace(function());
    } catch (...) {
      failure = std::current_exception();
    }
    end();
    if (failure) std::rethrow_exception(std::move(failure));
    return std::move(*result);
  }
}

}  // namespace dtcomm::python
