"""The prepared plans of a communicator, and the table of calls that repeat earlier ones.

The first calls of a collective find or make a plan in Python. `keep_repeated` then writes the plan down under the
arguments of the call in a table of the native module, and `run_repeated` runs it when the same arguments come again:
the same group, tensors of the same sizes and dtypes, contiguous and on the CPU, and equal options. Everything that
makes a plan invalid calls `forget_repeated`, which drops all of them: that is rare, and costs one ordinary call each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal

from torch.distributed import distributed_c10d as c10d

from dtcomm import _C
from dtcomm.errors import DtcommError
from dtcomm.runtime.types import Buffers, Plan
from dtcomm.work import NativeWork, Work

# A program whose sizes always change makes a plan for every call, which must not take memory without end.
MAX_PLANS = 4096
MAX_BYTES = 64 << 20

run_repeated: Callable[..., Work | Literal[False] | None] = _C.run_repeated
"""``run_repeated((group, input, output, collective, *options), async_op, seed, residual, epilogue)``: run an operation
and return None, or start it and return its ``Work``; False if it is not known."""

exchange_repeated = _C.exchange_repeated
"""``exchange_repeated(sent, received)``: run two messages at the same time and return True; False if one is not known.
Both are what `run_repeated` takes."""

send_message, receive_message = _C.send_message, _C.receive_message
"""Run a message of the torch.distributed backend, which a header precedes; see their docstrings."""

forget_repeated = _C.forget_repeated
"""Drop everything that `keep_repeated` has kept."""


def keep_repeated(
    repeated: tuple[Any, ...], plan: Any, buffers: Buffers, rank: int, counter: _C.CallCounter
) -> None:
    """Let `run_repeated` run an operation that has been run; ``repeated`` is its first argument.

    Nothing is kept if ``plan`` is not one of the native engine. Which of ``buffers`` this rank has is the same in every
    call.
    """
    native = plan.native() if hasattr(plan, "native") else None
    if native is None:
        return
    engine, native_plan, failed = native
    has_input, has_output = buffers.input is not None, buffers.output is not None
    has_residual = buffers.residual is not None
    _C.keep_repeated(
        repeated, engine, native_plan, counter, rank, has_input, has_output, has_residual, failed
    )


def _make_work(
    native: _C.NativeWork, operands: tuple[Any, ...], failed: Callable[[DtcommError], None]
) -> Work:
    output = operands[0][2]
    return NativeWork(native, operands, [] if output is None else [output], failed)


_C.initialize_repeated_calls(c10d, _make_work)


class PlanCache(dict[Hashable, Plan]):
    """Plans by the arguments of a call, of ``table_bytes`` by their own count.

    Beyond a bound all but the newest are dropped and made again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes_of: dict[Hashable, int] = {}
        self.table_bytes = 0

    def keep(self, key: Hashable, plan: Plan, table_bytes: int) -> None:
        """Keep a plan that takes ``table_bytes`` of memory, in place of another one of the same key."""
        self.pop(key, None)
        self.table_bytes += table_bytes - self._bytes_of.pop(key, 0)
        if self.table_bytes > MAX_BYTES or len(self) >= MAX_PLANS:
            self.clear()
            self.table_bytes = table_bytes
        self[key] = plan
        self._bytes_of[key] = table_bytes

    def clear(self) -> None:
        """Drop all plans."""
        forget_repeated()
        super().clear()
        self._bytes_of.clear()
        self.table_bytes = 0
