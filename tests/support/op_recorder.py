"""What torch's operators and the native kernels read and write on a thread, told to who judges it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtcomm.kernels import cpu
from dtcomm.kernels.types import Combine

# Operators that take a value to the host.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")

_watching = threading.local()


class Judge(Protocol):
    """Who is told."""

    faults: list[str]
    """What is wrong."""

    def access(self, tensor: torch.Tensor | None, write: bool) -> None:
        """The current stream reads a tensor, or writes it."""


def judge() -> Judge | None:
    """Who judges what this thread does."""
    return getattr(_watching, "streams", None)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every torch operator on this thread, as an access of the current stream."""

    def __init__(self, streams: Judge) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator imports torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if judge() is not self._streams:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in WAITS:
            self._streams.faults.append(f"the host waits for the device in {name}")
        result = func(*args, **kwargs)
        for tensor, written in accesses(func, args, kwargs, result):
            self._streams.access(tensor, written)
        return result


def accesses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Iterator[tuple[torch.Tensor, bool]]:
    """What an operator has read and written; nothing of views."""
    schema = func._schema
    if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.arguments):
        return
    given = [
        *zip(schema.arguments, args),
        *((_named(schema, key), value) for key, value in kwargs.items()),
    ]
    for argument, value in given:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf, written
    if "empty" not in func.overloadpacket.__name__:
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                yield leaf, True


def _named(schema: Any, name: str) -> Any:
    return next(argument for argument in schema.arguments if argument.name == name)


@contextmanager
def watched(streams: Judge) -> Iterator[None]:
    """Judge what this thread does within the block: torch's operators and the native kernels.

    Kernels are judged in every thread that is within such a block, so ranks may be threads.
    """
    _patch()
    _watching.streams = streams
    try:
        with _Watch(streams):
            yield
    finally:
        _watching.streams = None


@contextmanager
def unwatched() -> Iterator[None]:
    """What the test itself does."""
    before, _watching.streams = judge(), None
    try:
        yield
    finally:
        _watching.streams = before


_patched = False


def _patch() -> None:
    global _patched
    if _patched:
        return
    _patched = True
    combine, decode = cpu.combine, cpu.decode

    def watched_combine(kernel: str, call: Combine) -> None:
        streams = judge()
        if streams is not None:
            for payload in call.payloads:
                streams.access(payload, False)
            streams.access(call.local, False)
            for written in (call.residual, call.payload_out, call.out):
                streams.access(written, True)
        combine(kernel, call)

    def watched_decode(kernel: str, codec: Any, payload: torch.Tensor, *rest: Any) -> None:
        streams = judge()
        if streams is not None:
            streams.access(payload, False)
            streams.access(rest[-1], True)
        decode(kernel, codec, payload, *rest)

    cpu.combine = watched_combine
    cpu.decode = watched_decode  # type: ignore[assignment]
