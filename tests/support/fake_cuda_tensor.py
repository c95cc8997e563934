"""CPU tensors that act as CUDA tensors, so that a program's use of a device can be checked without a GPU.

A `FakeCudaTensor` reports that it is on `DEVICE`. Operations that would make the host wait for the device (reading
values, copies from and to pageable memory) are recorded as faults, and so is work on one stream that is not ordered
after another stream's (`RecordedStreams`). Mixing it with a CPU tensor raises, as in torch, and a CPU kernel cannot use
its address. A copy to the host arrives only after an event that follows it has been queried. Codecs run with the CPU's
kernels.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dtcomm import _C
from dtcomm import streams as runtime_streams
from dtcomm.kernels import cpu, dispatch, low_rank
from dtcomm.kernels.calls import CallGroup, Combine, Runner, Tensors
from tests.support.op_recorder import WAITS, accesses, grouped_accesses, not_recording
from tests.support.stream_checker import RecordedStreams

DEVICE = torch.device("cuda", 0)

_thread_state = threading.local()
_INDEXING = ("index", "index_put", "index_put_")
_HOST_ACCESSORS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


class Address:
    """The address of a fake CUDA tensor, which can be compared but not passed to a CPU kernel."""

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


class FakeCudaTensor(torch.Tensor):
    """The CPU tensor ``host`` as a tensor of the device."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> FakeCudaTensor:
        tensor: FakeCudaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=host.device,
        )
        tensor.host = host
        return tensor

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
        return f"FakeCudaTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def to_fake_cuda(tensor: torch.Tensor) -> FakeCudaTensor:
    """Return the tensor on the fake device; if streams are checked, its memory belongs to the current one."""
    fake = FakeCudaTensor(tensor.detach())
    checker = _checker()
    if checker is not None:
        checker.allocated(fake.host)
    return fake


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the current contents on the host, for the test itself."""
    return tensor.host.clone() if isinstance(tensor, FakeCudaTensor) else tensor


def _checker() -> RecordedStreams | None:
    return getattr(_thread_state, "streams", None)


def _host(leaf: Any) -> Any:
    return leaf.host if isinstance(leaf, FakeCudaTensor) else leaf


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operator as the current stream would."""
    name = func.overloadpacket.__name__
    checker = _checker()
    tensors = list(_tensors((*args, *kwargs.values())))
    if checker is not None and (name in WAITS or (name in _INDEXING and _by_mask(tensors[1:]))):
        checker.faults.append(f"the host waits for the device in {name}")
    if name == "copy_" and not all(isinstance(item, FakeCudaTensor) for item in tensors):
        queued = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return _copy(checker, args[0], args[1], queued)
    cpu_tensors = [item for item in tensors if not isinstance(item, FakeCudaTensor) and item.ndim > 0]
    if cpu_tensors:
        raise RuntimeError(f"{name}: tensors on two devices, cpu {tuple(cpu_tensors[0].shape)} among them")
    hosts = {id(leaf.host): leaf for leaf in tensors if isinstance(leaf, FakeCudaTensor)}
    plain_args = _mapped(_host, args)
    plain_kwargs = {key: _mapped(_host, item) for key, item in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    view = any(
        item.alias_info is not None and not item.alias_info.is_write for item in func._schema.arguments
    )
    if not view:
        operators.append(name)
    if checker is not None and not view:
        for item in _tensors((result,)):
            if id(item) not in hosts:
                checker.allocated(item)
        for tensor, written in accesses(func, plain_args, plain_kwargs, result):
            checker.access(tensor, written)

    def as_fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return hosts.get(id(leaf)) if id(leaf) in hosts else FakeCudaTensor(leaf)

    return _mapped(as_fake, result)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_mapped(change, item) for item in value]
    return change(value)


def _by_mask(indices: list[torch.Tensor]) -> bool:
    """Return whether only the device knows the number of selected elements."""
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _copy(
    checker: RecordedStreams | None, to: torch.Tensor, source: torch.Tensor, queued: bool
) -> torch.Tensor:
    """Copy between the host and the device."""
    operators.append("copy_")
    if checker is None:
        _host(to).copy_(_host(source))
        return to
    plain = source if isinstance(to, FakeCudaTensor) else to
    if source.ndim or not isinstance(to, FakeCudaTensor):  # a scalar is passed as an argument of the kernel
        if not checker.staged(plain):
            checker.faults.append("the host waits for the device in copy_: its memory is not pinned")
        elif not queued:
            checker.faults.append("the host waits for the device in copy_: non_blocking is not set")
    if isinstance(to, FakeCudaTensor):
        checker.access(to.host, True)
        to.host.copy_(source)
    else:
        checker.access(_host(source), False)
        checker.deliver(to, _host(source).clone())
    return to


class _Mode(TorchFunctionMode):
    """Intercepts functions whose arguments name the device or whose results are on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        checker = _checker()
        first = args[0] if args else None
        if isinstance(first, FakeCudaTensor) and name in _HOST_ACCESSORS:
            if checker is not None:
                checker.faults.append(f"the host waits for the device in {name}")
            return func(host_copy(first), *args[1:], **kwargs)
        if name in ("to", "cuda", "pin_memory") and isinstance(first, torch.Tensor):
            return _moved(checker, func, name, first, args[1:], kwargs)
        if _is_device(kwargs.get("device")):
            if name in ("tensor", "as_tensor") and checker is not None:
                checker.faults.append(
                    f"the host waits for the device in torch.{name}: its memory is not pinned"
                )
            result = func(*args, **{**kwargs, "device": "cpu"})
            if not name.startswith("empty"):
                operators.append(name)
            return result if isinstance(result, FakeCudaTensor) else to_fake_cuda(result)
        return func(*args, **kwargs)


def _moved(
    checker: RecordedStreams | None, func: Any, name: str, source: torch.Tensor, args: Any, kwargs: Any
) -> Any:
    target = kwargs.pop("device", None)
    other_args = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            target = arg.device
        elif isinstance(arg, torch.device) or (isinstance(arg, str) and target is None):
            target = torch.device(arg)
        else:
            other_args.append(arg)
    target = DEVICE if name == "cuda" else source.device if target is None else torch.device(target)
    if name == "pin_memory":
        if checker is None or isinstance(source, FakeCudaTensor):
            raise RuntimeError("pin_memory: of a CPU tensor, by streams.staging")
        pinned = checker.staging(source.nbytes).view(source.dtype).view(source.shape)
        return pinned.copy_(source)
    if _is_device(target) == isinstance(source, FakeCudaTensor):
        return func(source, *other_args, **kwargs) if name == "to" and (other_args or kwargs) else source
    queued = kwargs.pop("non_blocking", False)
    changed = func(source, *other_args, **kwargs) if other_args or kwargs else source
    if isinstance(source, FakeCudaTensor):
        if checker is not None:
            checker.faults.append("the host waits for the device in to: a copy to memory of the host")
        return host_copy(changed)
    empty = torch.empty_like(changed)
    copy_on_device = to_fake_cuda(empty)
    _copy(checker, copy_on_device, changed, queued)
    return copy_on_device


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


#: How many kernels each call of the fake module of CUDA kernels stands for, in the order of the calls.
launches: list[int] = []
#: The operators of torch that take a kernel or a copy of the device, in order.
operators: list[str] = []


def launches_of(group: CallGroup) -> int:
    """How many kernels csrc/cuda/kernels.cu launches for a group."""
    kinds = Counter(
        (
            min(len(call.payloads), 2),
            call.payload_out is not None,
            not call.payloads and bool(call.out or call.residual_out),
        )
        for call in group.calls
    )
    return sum(-(-count // 64) for count in kinds.values())


class _Kernels:
    """Replaces the module of CUDA kernels: runs the CPU's kernels on the tensors' host memory."""

    @staticmethod
    def prepare(group: CallGroup, device: torch.device) -> Runner | None:
        calls = _C.GroupedCalls(*group.native())

        def run(tensors: Tensors, seed: int) -> None:
            for tensor in tensors.tensors:
                assert tensor is None or isinstance(tensor, FakeCudaTensor), "a CPU tensor"
            if (checker := _checker()) is not None:
                for memory, written in grouped_accesses(group, [_host(tensor) for tensor in tensors.tensors]):
                    checker.access(memory, written)
            addresses = [0 if tensor is None else _host(tensor).data_ptr() for tensor in tensors.tensors]
            launches.append(launches_of(group))
            with not_recording():
                calls.run(dispatch.native_kernel(), addresses, seed)

        return run

    @staticmethod
    def combine(call: Combine) -> None:
        launches.append(1)
        checker = _checker()
        reads = [*call.payloads, call.local]
        writes = [call.residual, call.payload_out, call.out]
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor is not None and not isinstance(tensor, FakeCudaTensor):
                    raise RuntimeError(
                        f"a kernel of the device received a CPU tensor of shape {tuple(tensor.shape)}"
                    )
                if checker is not None and tensor is not None:
                    checker.access(tensor.host, written)
        bare = call._replace(
            payloads=tuple(map(_host, call.payloads)),
            local=_host(call.local),
            residual=_host(call.residual),
            payload_out=_host(call.payload_out),
            out=_host(call.out),
        )
        with not_recording():
            cpu.combine(dispatch.native_kernel(), bare)

    @staticmethod
    def decode(codec: Any, payload: Any, numel: int, dtype: torch.dtype, out: Any) -> None:
        launches.append(1)
        checker = _checker()
        if checker is not None:
            checker.access(payload.host, False)
            checker.access(out.host, True)
        with not_recording():
            cpu.decode(dispatch.native_kernel(), codec, payload.host, numel, dtype, out.host)

    @staticmethod
    def orthonormalize(vectors: Sequence[Any], keys: Sequence[int]) -> None:
        checker = _checker()
        for matrix, key in zip(vectors, keys, strict=True):
            if checker is not None:
                checker.access(matrix.host, True)
            with not_recording():
                low_rank.orthonormalize(matrix.host, key)

    @staticmethod
    def factors_finite(lefts: Sequence[Any], rights: Sequence[Any]) -> Any:
        finite_flags = to_fake_cuda(torch.empty(len(lefts), dtype=torch.bool))
        checker = _checker()
        for index, sides in enumerate(zip(lefts, rights, strict=True)):
            if checker is not None:
                for factor in (*sides, finite_flags):
                    checker.access(factor.host, True)
            with not_recording():
                finite = all(bool(torch.isfinite(factor.host).all()) for factor in sides)
                finite_flags.host[index] = finite
                for factor in sides if not finite else ():
                    factor.host.zero_()
        return finite_flags

    @staticmethod
    def expand(gradient: Any, residual: Any, left: Any, right: Any, finite: Any) -> None:
        checker = _checker()
        if checker is not None:
            for tensor, written in (
                (left, False),
                (right, False),
                (finite, False),
                (gradient, True),
                (residual, True),
            ):
                if tensor is not None:
                    checker.access(tensor.host, written)
        with not_recording():
            if finite is None or bool(finite.host):
                low_rank.expand(gradient.host, _host(residual), left.host, right.host)
            else:
                gradient.host.fill_(float("nan"))


@contextmanager
def fake_cuda_device(streams: RecordedStreams) -> Iterator[None]:
    """Give this thread a fake CUDA device with these streams, within the block."""
    originals = dispatch.installed, dispatch.cuda_kernels, runtime_streams.STREAM_TYPES["cuda"]
    dispatch.installed = lambda: True
    dispatch.cuda_kernels = lambda: _Kernels
    runtime_streams.STREAM_TYPES["cuda"] = lambda _: streams.another()
    streams.device = DEVICE
    _thread_state.streams = streams
    try:
        with _Mode():
            yield
    finally:
        _thread_state.streams = None
        dispatch.installed, dispatch.cuda_kernels, runtime_streams.STREAM_TYPES["cuda"] = originals


@contextmanager
def unchecked() -> Iterator[None]:
    """Do not check what the test itself does within the block."""
    before, _thread_state.streams = _checker(), None
    try:
        yield
    finally:
        _thread_state.streams = before
