"""Which kernel runs: the best for the tensors' device, unless DTCOMM_KERNEL or :func:`use` forces another.

Tensors on the CPU go to the native build that is best for it. Tensors on a CUDA device go to `cuda` where the module
`_cuda` was built, otherwise to `triton`, if that knows the codec (none knows `exact`). What is forced runs or raises:
nothing falls back in silence. The engine has native kernels only: forcing `cuda` or `triton` leaves it the best one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from dtcomm import _C, env
from dtcomm.codecs import Codec
from dtcomm.kernels import triton

REFERENCE, CUDA, TRITON = "reference", "cuda", "triton"
TORCH = "torch"  # no kernels: what :func:`low_rank_backend` says where there are none
CUDA_KERNELS = frozenset({CUDA, TRITON})  # what :func:`load_backend` has

# One list for the process and not one per thread: autograd runs a model's hooks on threads of its own.
_forced: list[str] = []


def available(device: str = "cpu") -> tuple[str, ...]:
    """The kernels that can run here on tensors of that type of device (cpu or cuda), best first.

    `triton` is one of the CPU's where TRITON_INTERPRET=1: its interpreter is for tests.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: no kernels for {device!r}; valid: cpu, cuda")
    if device == "cuda":
        return _for_devices() if torch.cuda.is_available() else ()
    interpreter = (TRITON,) if triton.interpreted() and _installed(TRITON) else ()
    return (*_NATIVE, REFERENCE, *interpreter)


def current() -> str:
    """The kernel that runs now: what is forced, otherwise the CPU's best."""
    return _force() or _BEST


def native_kernel() -> str:
    """The native build in use, for those who need one (the engine): `generic` stands in for the reference."""
    name = current()
    return "generic" if name == REFERENCE else name if name in _NATIVE else _BEST


@contextmanager
def use(name: str) -> Iterator[None]:
    """Within the block, in every thread, run the kernel called `name`; the innermost block wins."""
    _forced.append(_known(name, "name"))
    _tell_engine()
    try:
        yield
    finally:
        _forced.pop()
        _tell_engine()


def kernel_for(codec: Codec, argument: str, tensor: torch.Tensor) -> str:
    """The kernel that runs `codec` on the device of `tensor`, which the caller passed as `argument`.

    Raises ValueError where what is forced cannot, RuntimeError where nothing that is installed can.
    """
    name = _force()
    if tensor.is_cpu:
        name = name or _BEST
        if name in _ON_CPU:
            return name
        if name != TRITON or not triton.interpreted():
            hint = " but with TRITON_INTERPRET=1" if name == TRITON else ""
            raise ValueError(
                f"{argument}: on cpu, where the kernel that is forced, {name!r}, cannot run{hint}"
            )
        return _able(name, codec)
    if not name:
        return _best_of_device(codec, argument, tensor.device)
    if name not in (CUDA, TRITON):
        raise ValueError(
            f"{argument}: on {tensor.device}, where the kernel that is forced, {name!r}, cannot run"
        )
    return _able(name, codec)


def low_rank_backend() -> str:
    """What makes factors of low rank orthonormal on a device, and multiplies them: `cuda`, unless `triton` is forced or
    `_cuda` was not built; then `torch`, the operators of torch, with bits of their own.
    """
    name = _force()
    return CUDA if CUDA in ((name,) if name else _for_devices()) else TORCH


def load_backend(name: str) -> Any:
    """What runs `cuda` or `triton`: a module with ``combine`` and ``decode``; of `cuda` also with what factors need."""
    return import_module("dtcomm.kernels.cuda") if name == CUDA else triton


def _best_of_device(codec: Codec, argument: str, device: torch.device) -> str:
    for name in _for_devices():
        if runs_on(name, codec):
            return name
    missing = [] if _installed(CUDA) or not runs_on(CUDA, codec) else [f"for it build {_INSTALL[CUDA]}"]
    if triton.supports(codec):
        missing.append(f"for this one install {_INSTALL[TRITON]}")
    here = ", ".join(_for_devices()) or "none"
    raise RuntimeError(
        f"{argument}: no kernel of this installation runs codec {str(codec)!r} on {device} (installed: {here}); "
        + ("; or ".join(missing) or "move it to the cpu")
    )


def _able(name: str, codec: Codec) -> str:
    if not runs_on(name, codec):
        raise ValueError(f"codec: the kernel that is forced, {name!r}, does not run {str(codec)!r}")
    return name


def runs_on(name: str, codec: Codec) -> bool:
    """Whether kernel `name`, which is `cuda` or `triton`, runs this codec."""
    return codec.has_cuda_kernel if name == CUDA else triton.supports(codec)


def _force() -> str:
    """The kernel that is forced; empty: none."""
    if _forced:
        return _forced[-1]
    name = env.get("DTCOMM_KERNEL")
    return _known(name, "DTCOMM_KERNEL") if name else ""


def _known(name: str, argument: str) -> str:
    if name not in _ON_CPU and name not in _devices_kernels():
        valid = ", ".join((*_devices_kernels(), *_ON_CPU))
        hint = f"; {name!r} needs {_INSTALL[name]}" if name in _INSTALL else ""
        raise ValueError(f"{argument}: no kernel {name!r} on this machine; valid: {valid}{hint}")
    return name


def _devices_kernels() -> tuple[str, ...]:
    """The kernels for CUDA devices that are installed, best first."""
    return tuple(name for name in (CUDA, TRITON) if _installed(name))


def _for_devices() -> tuple[str, ...]:
    """Those that would run on the device: Triton's interpreter takes copies to the CPU, and only where it is forced."""
    return tuple(name for name in _devices_kernels() if name != TRITON or not triton.interpreted())


@cache
def _installed(name: str) -> bool:
    module = "dtcomm._cuda" if name == CUDA else "triton"
    return module in sys.modules or find_spec(module) is not None


def _tell_engine() -> None:
    name = current()
    _C.set_engine_kernels(name if name in _ON_CPU else _BEST)


_INSTALL = {
    CUDA: "the module _cuda (nvcc, then DTCOMM_CUDA=1 pip install --no-build-isolation .)",
    TRITON: "triton (pip install dtcomm[triton])",
}
_NATIVE = tuple(name for name, supported in _C.kernels() if supported)
_ON_CPU = (*_NATIVE, REFERENCE)
_BEST = _NATIVE[0]
_tell_engine()  # a wrong DTCOMM_KERNEL is refused here, before any rank depends on it
