"""Which kernel runs a call: the best one for the tensors' device, unless DTCOMM_KERNEL or :func:`use` forces another.

CPU tensors go to the best native build (csrc/cpu). CUDA tensors go to `cuda` if the module `_cuda` was built, else to
`triton` if it supports the codec. A forced kernel runs the call or raises; nothing falls back silently. The engine has
native kernels only: while `cuda` or `triton` is forced it uses the best native build. A codec written in Python is its
own kernel: nothing else can run it, so nothing that is forced applies to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.kernels import triton
from dtcomm.kernels.calls import DeviceKernels

REFERENCE, CUDA, TRITON = "reference", "cuda", "triton"
PYTHON = "python"  # the functions of a codec written in Python, whatever kernel is forced for other codecs
TORCH = "torch"  # :func:`low_rank_backend`: operators of torch instead of kernels
CUDA_KERNELS = frozenset({CUDA, TRITON})  # the names that :func:`load_backend` takes

# One list per process, not per thread: autograd runs hooks of a model in threads of its own.
_forced: list[str] = []


def available(device: str = "cpu") -> tuple[str, ...]:
    """The kernels that can run on tensors of a type of device, best first.

    With TRITON_INTERPRET=1 the CPU's list includes `triton`, whose interpreter is for tests.

    Args:
        device: "cpu" or "cuda".

    Returns:
        Names that :func:`use` and DTCOMM_KERNEL take. Empty for "cuda" if torch sees no CUDA device.

    Raises:
        ValueError: Another device was named.

    Example:
        >>> import dtcomm
        >>> dtcomm.kernels.available()[-2:]
        ('generic', 'reference')
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: no kernels for {device!r}; valid: cpu, cuda")
    if device == "cuda":
        return _for_devices() if torch.cuda.is_available() else ()
    interpreter = (TRITON,) if triton.interpreted() and _installed(TRITON) else ()
    return (*NATIVE, REFERENCE, *interpreter)


def current() -> str:
    """The kernel that runs now on CPU tensors: the forced one, otherwise the best native build.

    Returns:
        A name of :func:`available`.

    Example:
        >>> import dtcomm
        >>> with dtcomm.kernels.use("generic"):
        ...     dtcomm.kernels.current()
        'generic'
    """
    return _force() or _BEST


def native_kernel() -> str:
    """The native build in use, for callers that need one (the engine): `generic` stands in for the reference."""
    name = current()
    return "generic" if name == REFERENCE else name if name in NATIVE else _BEST


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force a kernel within a ``with`` block, in all threads; the innermost block wins.

    Args:
        name: One of :func:`available`, for the CPU or for CUDA devices.

    Yields:
        Nothing; the kernel is forced until the block ends.

    Raises:
        ValueError: This machine has no kernel of that name. Calls within the block raise ValueError if the forced
            kernel cannot run them.

    Example:
        >>> import torch, dtcomm
        >>> x = torch.tensor([0.5, -1.0])
        >>> with dtcomm.kernels.use("reference"):
        ...     expected = dtcomm.encode("int8", x)
        >>> torch.equal(dtcomm.encode("int8", x), expected)
        True
    """
    _forced.append(_known(name, "name"))
    _update_engine()
    try:
        yield
    finally:
        _forced.pop()
        _update_engine()


def kernel_for(codec: Codec, argument: str, tensor: torch.Tensor) -> str:
    """The kernel that runs `codec` on the device of `tensor`, which the caller passed as `argument`.

    Raises ValueError if the forced kernel cannot, and RuntimeError if no installed kernel can.
    """
    if codec.in_python:
        return PYTHON
    name = _force()
    if tensor.is_cpu:
        name = name or _BEST
        if name in _ON_CPU:
            return name
        if name != TRITON or not triton.interpreted():
            hint = " without TRITON_INTERPRET=1" if name == TRITON else ""
            raise ValueError(f"{argument}: is on cpu, where the forced kernel {name!r} cannot run{hint}")
        return _supporting(name, codec)
    if not name:
        return _best_for_device(codec, argument, tensor.device)
    if name not in CUDA_KERNELS:
        raise ValueError(f"{argument}: is on {tensor.device}, where the forced kernel {name!r} cannot run")
    return _supporting(name, codec)


def low_rank_backend() -> str:
    """What runs the passes of `low_rank` on CUDA tensors: CUDA, or TORCH (operators of torch).

    It is TORCH if `triton` is forced or `_cuda` was not built. The two differ in the bits of orthonormal factors.
    """
    name = _force()
    return CUDA if CUDA in ((name,) if name else _for_devices()) else TORCH


def load_backend(name: str) -> DeviceKernels:
    """The module of kernel `cuda` or `triton`, imported when it is first used."""
    if name == CUDA:
        from dtcomm.kernels import cuda

        return cuda
    from dtcomm.kernels.triton import launch

    return launch


def runs_on(name: str, codec: Codec) -> bool:
    """Whether kernel `name`, which is `cuda` or `triton`, supports `codec`."""
    return codec.has_cuda_kernel if name == CUDA else triton.supports(codec)


def _best_for_device(codec: Codec, argument: str, device: torch.device) -> str:
    for name in _for_devices():
        if runs_on(name, codec):
            return name
    missing = [] if _installed(CUDA) or not runs_on(CUDA, codec) else [f"for it build {_INSTALL[CUDA]}"]
    if triton.supports(codec):
        missing.append(f"for this one install {_INSTALL[TRITON]}")
    installed = ", ".join(_for_devices()) or "none"
    raise RuntimeError(
        f"{argument}: no kernel of this installation runs codec {str(codec)!r} on {device} (installed: {installed}); "
        + ("; or ".join(missing) or "move it to the cpu")
    )


def _supporting(name: str, codec: Codec) -> str:
    if not runs_on(name, codec):
        raise ValueError(f"codec: the forced kernel {name!r} does not support {str(codec)!r}")
    return name


def _force() -> str:
    """The forced kernel; empty if none is."""
    if _forced:
        return _forced[-1]
    name = _C.kernel_variable()
    return _known(name, "DTCOMM_KERNEL") if name else ""


def _known(name: str, argument: str) -> str:
    if name not in _ON_CPU and name not in _installed_for_devices():
        valid = ", ".join((*_installed_for_devices(), *_ON_CPU))
        hint = f"; {name!r} needs {_INSTALL[name]}" if name in _INSTALL else ""
        raise ValueError(f"{argument}: no kernel {name!r} on this machine; valid: {valid}{hint}")
    return name


def _installed_for_devices() -> tuple[str, ...]:
    return tuple(name for name in (CUDA, TRITON) if _installed(name))


def _for_devices() -> tuple[str, ...]:
    """Installed kernels that run on the device itself: Triton's interpreter works on copies, so it must be forced."""
    return tuple(name for name in _installed_for_devices() if name != TRITON or not triton.interpreted())


@cache
def _installed(name: str) -> bool:
    module = "dtcomm._cuda" if name == CUDA else "triton"
    return module in sys.modules or find_spec(module) is not None


def _update_engine() -> None:
    name = current()
    _C.set_kernel_forced(bool(_forced))
    _C.set_engine_kernels(name if name in _ON_CPU else _BEST)


_INSTALL = {
    CUDA: "the module _cuda (nvcc, then DTCOMM_CUDA=1 pip install --no-build-isolation .)",
    TRITON: "triton (pip install dtcomm[triton])",
}
NATIVE = tuple(name for name, supported in _C.kernels() if supported)
_ON_CPU = (*NATIVE, REFERENCE)
_BEST = NATIVE[0]
# Since torch 2.10. Without these functions C code cannot read tensors, and no call takes the short way of repeats.
_C.initialize_tensor_reader(torch.Tensor, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
_update_engine()  # raises for a wrong DTCOMM_KERNEL now, before any rank depends on it
