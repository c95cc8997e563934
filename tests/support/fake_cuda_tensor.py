"""CPU tensors dressed as tensors of a CUDA device: what a program does with them is judged as a device would have it.

A `Dressed` tensor says that it is on `DEVICE`. What would make the host wait for the device (its values, copies from
and to ordinary memory) is a fault, as is work on one stream that does not follow another's (`RecordedStreams`); mixing
it with a CPU tensor raises as torch does, and a CPU kernel cannot have its address. A copy to the host arrives only
when an event behind it has been looked at. Codecs run by the CPU's kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtcomm.device import streams as runtime_streams
from dtcomm.kernels import cpu, dispatch, low_rank, low_rank_torch
from dtcomm.kernels.types import Combine
from tests.support.op_recorder import WAITS, accesses, unwatched
from tests.support.stream_checker import RecordedStreams

DEVICE = torch.device("cuda", 0)

_dressing = threading.local()
_INDEXED = ("index", "index_put", "index_put_")
_faults_of_host = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


class Address:
    """Where a dressed tensor lies: to be compared, and of no use to a CPU kernel."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __add__(self, count: int) -> Address:
        return Address(self._value + count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._value == other._value

    def __lt__(self, other: Address) -> bool:
        return self._value < other._value

    def __le__(self, other: Address) -> bool:
        return self._value <= other._value

    def __hash__(self) -> int:
        return hash(self._value)


class Dressed(torch.Tensor):
    """``host`` as a tensor of the device."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Dressed:
        made: Dressed = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=host.device,
        )
        made.host = host
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> Any:
        return Address(self.host.data_ptr())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Dressed({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def dress(tensor: torch.Tensor) -> Dressed:
    """On the device; memory of the caller's stream, where streams are judged."""
    made = Dressed(tensor.detach())
    judge = _judge()
    if judge is not None:
        judge.made(made.host)
    return made


def undress(tensor: torch.Tensor) -> torch.Tensor:
    """What is there by now, for the test to look at: a copy."""
    return tensor.host.clone() if isinstance(tensor, Dressed) else tensor


def _judge() -> RecordedStreams | None:
    return getattr(_dressing, "streams", None)


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, Dressed) else leaf


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator, as the current stream would run it."""
    name = func.overloadpacket.__name__
    judge = _judge()
    tensors = list(_tensors((*args, *kwargs.values())))
    if judge is not None and (name in WAITS or (name in _INDEXED and _by_mask(tensors[1:]))):
        judge.faults.append(f"the host waits for the device in {name}")
    if name == "copy_" and not all(isinstance(each, Dressed) for each in tensors):
        queued = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return _copy(judge, args[0], args[1], queued)
    strangers = [each for each in tensors if not isinstance(each, Dressed) and each.ndim > 0]
    if strangers:
        raise RuntimeError(f"{name}: tensors on two devices, cpu {tuple(strangers[0].shape)} among them")
    hosts = {id(leaf.host): leaf for leaf in tensors if isinstance(leaf, Dressed)}
    plain_args = _mapped(_host, args)
    plain_kwargs = {key: _mapped(_host, each) for key, each in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    view = any(
        each.alias_info is not None and not each.alias_info.is_write for each in func._schema.arguments
    )
    if judge is not None and not view:
        for each in _tensors((result,)):
            if id(each) not in hosts:
                judge.made(each)
        for tensor, written in accesses(func, plain_args, plain_kwargs, result):
            judge.access(tensor, written)

    def clothed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return hosts.get(id(leaf)) if id(leaf) in hosts else Dressed(leaf)

    return _mapped(clothed, result)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_mapped(change, each) for each in value]
    return change(value)


def _by_mask(indices: list[torch.Tensor]) -> bool:
    """Whether how many elements there are is known by the device alone."""
    return any(each.dtype in (torch.bool, torch.uint8) for each in indices)


def _copy(judge: RecordedStreams | None, to: torch.Tensor, given: torch.Tensor, queued: bool) -> torch.Tensor:
    """Between the host and the device."""
    if judge is None:
        _host(to).copy_(_host(given))
        return to
    plain = given if isinstance(to, Dressed) else to
    if given.ndim or not isinstance(to, Dressed):  # a number travels with the kernel that uses it
        if not judge.staged(plain):
            judge.faults.append("the host waits for the device in copy_: its memory is not pinned")
        elif not queued:
            judge.faults.append("the host waits for the device in copy_: non_blocking is not said")
    if isinstance(to, Dressed):
        judge.access(to.host, True)
        to.host.copy_(given)
    else:
        judge.access(_host(given), False)
        judge.deliver(to, _host(given).clone())
    return to


class _Mode(TorchFunctionMode):
    """Functions whose arguments name the device, or whose results are on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        judge = _judge()
        first = args[0] if args else None
        if isinstance(first, Dressed) and name in _faults_of_host:
            if judge is not None:
                judge.faults.append(f"the host waits for the device in {name}")
            return func(undress(first), *args[1:], **kwargs)
        if name in ("to", "cuda", "pin_memory") and isinstance(first, torch.Tensor):
            return _moved(judge, func, name, first, args[1:], kwargs)
        if _is_device(kwargs.get("device")):
            if name in ("tensor", "as_tensor") and judge is not None:
                judge.faults.append(
                    f"the host waits for the device in torch.{name}: its memory is not pinned"
                )
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made if isinstance(made, Dressed) else dress(made)
        return func(*args, **kwargs)


def _moved(
    judge: RecordedStreams | None, func: Any, name: str, given: torch.Tensor, args: Any, kwargs: Any
) -> Any:
    there = kwargs.pop("device", None)
    rest = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            there = arg.device
        elif isinstance(arg, torch.device) or (isinstance(arg, str) and there is None):
            there = torch.device(arg)
        else:
            rest.append(arg)
    there = DEVICE if name == "cuda" else given.device if there is None else torch.device(there)
    if name == "pin_memory":
        if judge is None or isinstance(given, Dressed):
            raise RuntimeError("pin_memory: of a CPU tensor, by streams.staging")
        pinned = judge.staging(given.nbytes).view(given.dtype).view(given.shape)
        return pinned.copy_(given)
    if _is_device(there) == isinstance(given, Dressed):
        return func(given, *rest, **kwargs) if name == "to" and (rest or kwargs) else given
    queued = kwargs.pop("non_blocking", False)
    changed = func(given, *rest, **kwargs) if rest or kwargs else given
    if isinstance(given, Dressed):
        if judge is not None:
            judge.faults.append("the host waits for the device in to: a copy to memory of the host")
        return undress(changed)
    made = torch.empty_like(changed)
    there_made = dress(made)
    _copy(judge, there_made, changed, queued)
    return there_made


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Kernels:
    """The module of kernels for the device: the CPU's, on what is under the dress."""

    @staticmethod
    def combine(call: Combine) -> None:
        judge = _judge()
        reads = [*call.payloads, call.local]
        writes = [call.residual, call.payload_out, call.out]
        for tensors, written in ((reads, False), (writes, True)):
            for each in tensors:
                if each is not None and not isinstance(each, Dressed):
                    raise RuntimeError(f"a kernel of the device got a tensor on the CPU {tuple(each.shape)}")
                if judge is not None and each is not None:
                    judge.access(each.host, written)
        bare = replace(
            call,
            payloads=tuple(map(_host, call.payloads)),
            local=_host(call.local),
            residual=_host(call.residual),
            payload_out=_host(call.payload_out),
            out=_host(call.out),
        )
        with unwatched():
            cpu.combine(dispatch.native_kernel(), bare)

    @staticmethod
    def decode(codec: Any, payload: Any, numel: int, dtype: torch.dtype, out: Any) -> None:
        judge = _judge()
        if judge is not None:
            judge.access(payload.host, False)
            judge.access(out.host, True)
        with unwatched():
            cpu.decode(dispatch.native_kernel(), codec, payload.host, numel, dtype, out.host)

    project_rows = staticmethod(low_rank_torch.project_rows)
    project_columns = staticmethod(low_rank_torch.project_columns)

    @staticmethod
    def orthonormalise(vectors: Sequence[Any], keys: Sequence[int]) -> None:
        judge = _judge()
        for each, key in zip(vectors, keys, strict=True):
            if judge is not None:
                judge.access(each.host, True)
            with unwatched():
                low_rank.orthonormalise(each.host, key)

    @staticmethod
    def factors_finite(lefts: Sequence[Any], rights: Sequence[Any]) -> Any:
        found = dress(torch.empty(len(lefts), dtype=torch.bool))
        judge = _judge()
        for at, sides in enumerate(zip(lefts, rights, strict=True)):
            if judge is not None:
                for each in (*sides, found):
                    judge.access(each.host, True)
            with unwatched():
                finite = all(bool(torch.isfinite(each.host).all()) for each in sides)
                found.host[at] = finite
                for each in sides if not finite else ():
                    each.host.zero_()
        return found

    @staticmethod
    def expand(gradient: Any, residual: Any, left: Any, right: Any, finite: Any) -> None:
        judge = _judge()
        if judge is not None:
            for each, written in (
                (left, False),
                (right, False),
                (finite, False),
                (gradient, True),
                (residual, True),
            ):
                if each is not None:
                    judge.access(each.host, written)
        with unwatched():
            if finite is None or bool(finite.host):
                low_rank.expand(gradient.host, _host(residual), left.host, right.host)
            else:
                gradient.host.fill_(float("nan"))


@contextmanager
def device(streams: RecordedStreams) -> Iterator[None]:
    """Within the block this process has a device, whose streams are ``streams``, on this thread."""
    kept = dispatch._for_devices, dispatch.load_backend, runtime_streams.STREAM_TYPES["cuda"]
    dispatch._for_devices = lambda: (dispatch.CUDA,)
    dispatch.load_backend = lambda name: _Kernels
    runtime_streams.STREAM_TYPES["cuda"] = lambda _: streams.another()
    streams.device = DEVICE
    _dressing.streams = streams
    try:
        with _Mode():
            yield
    finally:
        _dressing.streams = None
        dispatch._for_devices, dispatch.load_backend, runtime_streams.STREAM_TYPES["cuda"] = kept


@contextmanager
def unjudged() -> Iterator[None]:
    """What the test itself does."""
    before, _dressing.streams = _judge(), None
    try:
        yield
    finally:
        _dressing.streams = before
