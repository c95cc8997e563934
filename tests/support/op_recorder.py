"""Reports what torch operators and native kernels read and write on a thread to a recorder."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtcomm.kernels import cpu
from dtcomm.kernels.calls import CallGroup, Combine, Runner, Tensors

# Operators that copy a value to the host.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "bincount")

_thread_state = threading.local()


class AccessRecorder(Protocol):
    """Receives the accesses of a thread."""

    faults: list[str]
    """Descriptions of the faults found."""

    def access(self, tensor: torch.Tensor | None, write: bool) -> None:
        """Record that the current stream reads or writes a tensor."""


def current_recorder() -> AccessRecorder | None:
    """Return the recorder of this thread's accesses, if there is one."""
    return getattr(_thread_state, "streams", None)


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every torch operator on this thread as accesses of the current stream."""

    def __init__(self, streams: AccessRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator imports torch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current_recorder() is not self._streams:
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
    """Yield the tensors that an operator read (False) or wrote (True); operators that return views access nothing."""
    schema = func._schema
    if any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments
    ):
        return
    values = [*zip(schema.arguments, args), *((_named(schema, key), value) for key, value in kwargs.items())]
    for argument, value in values:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf, written
    if "empty" not in func.overloadpacket.__name__:
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                yield leaf, True


def grouped_accesses(
    group: CallGroup, tensors: Sequence[torch.Tensor | None]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the memory that a group of calls uses, as bytes, and whether it is written."""
    for call in group.calls:
        payload = group.codec.wire_bytes(call.numel, group.dtype)
        used = [
            *((place, payload, False) for place in call.payloads),
            (call.local, call.numel * (call.local_dtype or group.dtype).itemsize, False),
            (call.residual_in, call.numel * torch.float32.itemsize, False),
            (call.residual_out, call.numel * torch.float32.itemsize, True),
            (call.payload_out, payload, True),
            (call.out, call.numel * (call.out_dtype or group.dtype).itemsize, True),
        ]
        for place, size, written in used:
            tensor = None if place is None else tensors[place[0]]
            if place is not None and tensor is not None:
                memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                yield memory[place[1] : place[1] + size], written


def _named(schema: Any, name: str) -> Any:
    return next(argument for argument in schema.arguments if argument.name == name)


@contextmanager
def recording(streams: AccessRecorder) -> Iterator[None]:
    """Record what this thread does within the block: torch's operators and the native kernels.

    Each thread has its own recorder, so ranks may be threads.
    """
    _patch()
    _thread_state.streams = streams
    try:
        with _RecordingMode(streams):
            yield
    finally:
        _thread_state.streams = None


@contextmanager
def not_recording() -> Iterator[None]:
    """Do not record what the test itself does within the block."""
    before, _thread_state.streams = current_recorder(), None
    try:
        yield
    finally:
        _thread_state.streams = before


_patched = False


def _patch() -> None:
    global _patched
    if _patched:
        return
    _patched = True
    combine, decode = cpu.combine, cpu.decode

    def recorded_combine(kernel: str, call: Combine) -> None:
        streams = current_recorder()
        if streams is not None:
            for payload in call.payloads:
                streams.access(payload, False)
            streams.access(call.local, False)
            for written in (call.residual, call.payload_out, call.out):
                streams.access(written, True)
        combine(kernel, call)

    def recorded_decode(kernel: str, codec: Any, payload: torch.Tensor, *rest: Any) -> None:
        streams = current_recorder()
        if streams is not None:
            streams.access(payload, False)
            streams.access(rest[-1], True)
        decode(kernel, codec, payload, *rest)

    prepare = cpu.prepare

    def recorded_prepare(kernel: str, group: CallGroup) -> Runner:
        run = prepare(kernel, group)

        def recorded_run(tensors: Tensors, seed: int) -> None:
            recorder = current_recorder()
            if recorder is not None:
                with not_recording():
                    used = list(grouped_accesses(group, tensors.tensors))
                for memory, written in used:
                    recorder.access(memory, written)
            run(tensors, seed)

        return recorded_run

    cpu.prepare = recorded_prepare
    cpu.combine = recorded_combine
    cpu.decode = recorded_decode  # type: ignore[assignment]
