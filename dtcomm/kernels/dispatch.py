"""Which kernel runs a call: the best one for the tensors' device, unless DTCOMM_KERNEL or :func:`use` forces another.

CPU tensors go to the best native build (csrc/cpu), CUDA tensors to `cuda`, which needs the module `_cuda`. A forced
kernel runs the call or raises; nothing falls back silently. The engine has native kernels only: while `cuda` is forced
it uses the best native build. A codec written in Python is its own kernel: nothing else can run it, so nothing that is
forced applies to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs.spec import CODECS

REFERENCE, CUDA = "reference", "cuda"
PYTHON = "python"  # the functions of a codec written in Python, whatever kernel is forced for other codecs

# One list per process, not per thread: autograd runs hooks of a model in threads of its own.
_forced: list[str] = []


def available(device: str = "cpu") -> tuple[str, ...]:
    """The kernels that can run on tensors of a type of device, best first.

    Args:
        device: "cpu" or "cuda".

    Returns:
        Names that :func:`use` and DTCOMM_KERNEL take. Empty for "cuda" if torch sees no CUDA device or `_cuda` was not
        built.

    Raises:
        ValueError: Another device was named.

    Example:
        >>> import dtcomm
        >>> dtcomm.kernels.available()[-2:]
        ('generic', 'reference')
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: no kernels for {device!r}; valid: cpu, cuda")
    if device == "cpu":
        return _ON_CPU
    return (CUDA,) if installed() and torch.cuda.is_available() else ()


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
    name = _force() or (_BEST if tensor.is_cpu else CUDA)
    if (name in _ON_CPU) != tensor.is_cpu:
        raise ValueError(f"{argument}: is on {tensor.device}, where the forced kernel {name!r} cannot run")
    if name == CUDA:
        require_cuda_kernel(codec, f"{argument}: is on {tensor.device}")
    return name


def require_cuda_kernel(codec: Codec, context: str) -> None:
    """Raise an error that begins with ``context`` unless ``codec`` runs on CUDA tensors.

    It is a ValueError for a codec that has no CUDA kernel, and a RuntimeError without the module `_cuda`.
    """
    if codec.in_python:
        return
    if not codec.has_cuda_kernel:
        valid = ", ".join(
            name for name, entry in CODECS.items() if getattr(entry.make, "has_cuda_kernel", True)
        )
        raise ValueError(f"{context}, where codec {str(codec)!r} has no kernel; valid: {valid}")
    if not installed():
        raise RuntimeError(f"{context}, where codec {str(codec)!r} needs {_INSTALL}")


def cuda_kernels() -> ModuleType:
    """The module of kernel `cuda`, imported when it is first used. RuntimeError if `_cuda` was not built."""
    if not installed():
        raise RuntimeError(f"tensors: CUDA tensors need {_INSTALL}")
    from dtcomm.kernels import cuda

    return cuda


def _force() -> str:
    """The forced kernel; empty if none is."""
    if _forced:
        return _forced[-1]
    name = _C.kernel_variable()
    return _known(name, "DTCOMM_KERNEL") if name else ""


def _known(name: str, argument: str) -> str:
    valid = (CUDA, *_ON_CPU) if installed() else _ON_CPU
    if name not in valid:
        hint = f"; {name!r} needs {_INSTALL}" if name == CUDA else ""
        raise ValueError(f"{argument}: no kernel {name!r} on this machine; valid: {', '.join(valid)}{hint}")
    return name


@cache
def installed() -> bool:
    """Whether dtcomm's CUDA kernels, the module `_cuda`, were built."""
    return "dtcomm._cuda" in sys.modules or find_spec("dtcomm._cuda") is not None


def _update_engine() -> None:
    name = current()
    _C.set_kernel_forced(bool(_forced))
    _C.set_engine_kernels(name if name in _ON_CPU else _BEST)


_INSTALL = "dtcomm's module _cuda (nvcc, then DTCOMM_CUDA=1 pip install --no-build-isolation .)"
NATIVE = tuple(name for name, supported in _C.kernels() if supported)
_ON_CPU = (*NATIVE, REFERENCE)
_BEST = NATIVE[0]
# Since torch 2.10. Without these functions C code cannot read tensors, and no call takes the short way of repeats.
_C.initialize_tensor_reader(torch.Tensor, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
_update_engine()  # raises for a wrong DTCOMM_KERNEL now, before any rank depends on it
