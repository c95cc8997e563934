"""A pytest plugin that makes CPU tensors pass for CUDA tensors, so that the bodies of GPU tests can be checked without
a GPU: python -m pytest -p tests.cuda.fake_device_plugin tests/cuda -m gpu -k ...

The CPU's kernels replace the CUDA codec kernels, and the emulator the fused kernels. Streams and events order nothing,
and a graph is the list of dtcomm's calls that were made while it was captured. It works within one process only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import dtcomm


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda")


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are requested on a device; a copy to the device is a plain copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda or (func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1])):
            return args[0].clone()
        if func is torch.Tensor.pin_memory:
            return args[0]
        if _is_cuda(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


_captured: list[list[Callable[[], object]]] = []  # the graph that is being captured, if one is


def _queued(call: Callable[..., object]) -> Callable[..., None]:
    def queue(*args: Any) -> None:
        if _captured:
            _captured[-1].append(lambda: call(*args))
        else:
            call(*args)

    return queue


class _Graph:
    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextlib.contextmanager
def _capture(graph: _Graph, **_: object) -> Any:
    _captured.append(graph.calls)
    try:
        yield
    finally:
        _captured.pop()


class _Stream:
    """A stream that is never idle, as far as a test can see."""

    cuda_stream = 0

    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> _Event:
        return _Event()

    def query(self) -> bool:
        return False


class _Event:
    def __init__(self, *_: object, **__: object) -> None:
        self._at = 0.0

    def record(self, *_: object) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later._at - self._at)

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _install() -> None:
    replacements = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph": _capture,
        "current_stream": _Stream,
        "synchronize": lambda *_: None,
        "set_sync_debug_mode": lambda mode: None,
        "_sleep": lambda cycles: None,
        "is_current_stream_capturing": lambda: bool(_captured),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(
            multi_processor_count=2, name="no GPU", uuid="1", major=9, minor=0, total_memory=1 << 33
        ),
        "get_device_name": lambda device=None: "no GPU",
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (1 << 32, 1 << 33),
    }
    for name, replacement in replacements.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
        setattr(torch.cuda, name, replacement)

    if importlib.util.find_spec("dtcomm._cuda") is None:  # where there is no compiler for it
        module: Any = ModuleType("dtcomm._cuda")
        module.INLINE_PAYLOADS = 16
        sys.modules[module.__name__] = dtcomm._cuda = module  # type: ignore[attr-defined]
    from bench.common import virtual_ranks
    from dtcomm.kernels import cpu, cuda
    from dtcomm.runtime.cuda_peer import launch as fused
    from tests.support import host_sync_trace

    by_cpu, decode = cpu.combine, cpu.decode

    def combine(call: Any) -> None:
        cuda._table([payload.data_ptr() for payload in call.payloads], torch.device("cpu"))
        _queued(by_cpu)("avx2", call)

    def by_cpu_grouped(group: Any) -> Callable[..., None]:
        calls = dtcomm._C.GroupedCalls(*group.native())
        return lambda tensors, seed: calls.run("avx2", tensors.addresses, seed)

    cuda.combine = combine
    cuda.prepare = lambda group, device: _queued(by_cpu_grouped(group))
    cuda.decode = lambda *args: _queued(decode)("avx2", *args)

    class CudaLauncher(fused.EmulatorLauncher):
        def __init__(self, device: torch.device) -> None:
            super().__init__()

        def plan(self, **spec: Any) -> Callable[..., None]:
            return _queued(super().plan(**spec))

    fused.CudaLauncher = virtual_ranks.CudaLauncher = CudaLauncher  # type: ignore[assignment, misc]
    host_sync_trace.trace = lambda step: (step(), host_sync_trace.Trace([], ["fused_kernel"]))[1]  # type: ignore[func-returns-value]
    _OnCpu().__enter__()


_install()
