"""Which kernel runs: the best of this machine, unless DTCOMM_KERNEL or :func:`use` forces another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtcomm import _C, env

REFERENCE = "reference"

# One list for the process and not one per thread: autograd runs a model's hooks on threads of its own.
_forced: list[str] = []


def available() -> tuple[str, ...]:
    """The kernels that this machine can run, best first."""
    return (*(name for name, supported in _C.kernels() if supported), REFERENCE)


def current() -> str:
    """The kernel that runs now."""
    if _forced:
        return _forced[-1]
    name = env.get("DTCOMM_KERNEL")
    return _known(name, "DTCOMM_KERNEL") if name else _BEST


@contextmanager
def use(name: str) -> Iterator[None]:
    """Within the block, in every thread, run the kernel called `name`; the innermost block wins."""
    _forced.append(_known(name, "name"))
    _C.set_engine_kernels(current())
    try:
        yield
    finally:
        _forced.pop()
        _C.set_engine_kernels(current())


def _known(name: str, argument: str) -> str:
    if name not in _AVAILABLE:
        raise ValueError(f"{argument}: no kernel {name!r} on this machine; valid: {', '.join(_AVAILABLE)}")
    return name


_AVAILABLE = available()
_BEST = _AVAILABLE[0]
_C.set_engine_kernels(current())  # a wrong DTCOMM_KERNEL is refused here, before any rank depends on it
