"""Collectives that are repeated with the same arguments: one call of the native module, without planning or checking.

The first calls of a collective find or make a plan in Python. `keep` then writes the plan down under the arguments of
the call, and `start` runs it when the same arguments come again: the same group, tensors of the same sizes and dtypes,
contiguous and on the CPU, and equal options. Everything that makes a plan invalid calls `forget`, which drops all that
was kept: it is rare, and costs one ordinary call of each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

from dtcomm import _C
from dtcomm.errors import DtcommError
from dtcomm.work import NativeWork, Work

if TYPE_CHECKING:
    from dtcomm.runtime.communicator import Communicator
    from dtcomm.runtime.types import Buffers


def _make_work(
    native: _C.NativeWork, arguments: tuple[Any, ...], failed: Callable[[DtcommError], None]
) -> Work:
    output = arguments[3]
    return NativeWork(native, arguments, [] if output is None else [output], failed)


_C.initialize_warm_calls(c10d, _make_work)

start = _C.start_warm
"""``start((collective, group, input, output, *options), async_op)``: run an operation and return True, or start it and
return its ``Work``; False if it is not known."""

exchange = _C.exchange_warm
"""``exchange(sent, received)``: run two messages at the same time and return True; False if one is not known. Both are
what `start` takes."""

forget = _C.forget_warm
"""Drop everything that `keep` has kept."""


def keep(arguments: tuple[Any, ...], communicator: Communicator, plan: Any, buffers: Buffers) -> None:
    """Let `start` run an operation that has been run with these arguments.

    Args:
        arguments: The first argument of `start`.
        communicator: The ranks.
        plan: The plan of the operation; nothing is kept if it is not one of the native engine.
        buffers: The tensors of the call; which of them this rank has is the same in every call.
    """
    native = plan.native() if hasattr(plan, "native") else None
    if native is None or buffers.residual is not None:
        return
    engine, native_plan, failed = native
    has_input, has_output = buffers.input is not None, buffers.output is not None
    rank = communicator.rank
    _C.keep_warm(arguments, engine, native_plan, communicator.counter, rank, has_input, has_output, failed)
