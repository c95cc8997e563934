"""Calls of kernels: the record of a call as every kernel takes it, and the checks of its arguments.

Errors of a check name the argument, what was given and what is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from dtcomm import _C, errors
from dtcomm.codecs import Codec
from dtcomm.codecs.base import ELEMENT_TYPES

OPERATIONS = {"sum": 0, "min": 1, "max": 2}  # csrc/core/types.h's numbers


class Combine(NamedTuple):
    """One kernel call, with checked arguments: sum payloads and a local tensor, divide, encode, keep the error.

    It mirrors ``Combine`` in csrc/cpu/kernels.h. Every part is optional: without payloads it is an encoding, without
    ``payload_out`` a reduction. Tensors are contiguous, on one device and of the right size. It is a tuple because each
    call makes one: a frozen dataclass of so many fields takes longer to make than a kilobyte to encode.

    codec: The codec of `payloads` and `payload_out`.
    numel: Elements of every term.
    dtype: The type of the tensor that is encoded or reduced. `local` and `out` are of this type or float32.
    payloads: The encoded terms, in order.
    local: A term that is not encoded; it stands before ``payloads[position]``.
    residual: float32, added to `local` and overwritten with the error of the encoding.
    divisor: Divides the sum.
    op: sum, min or max.
    key, offset: Key of the random numbers, and the index of the first element in the caller's tensor.
    payload_out: Receives the encoding of the result.
    out: Receives the decoding of `payload_out`, or the result itself if there is no `payload_out`.
    """

    codec: Codec
    numel: int
    dtype: torch.dtype
    payloads: tuple[torch.Tensor, ...] = ()
    local: torch.Tensor | None = None
    position: int = 0
    residual: torch.Tensor | None = None
    divisor: int = 1
    op: str = "sum"
    key: int = 0
    offset: int = 0
    payload_out: torch.Tensor | None = None
    out: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EpilogueCall:
    """The tensors of an epilogue; it mirrors ``Epilogue`` in csrc/cpu/epilogue.h, which says what is computed.

    ``out``, [..., features], is the sum, which becomes ``out + bias + addend``. ``norm_out`` receives the normed sum,
    and ``codes`` with ``scales`` the same in 8 bits. What is None is left out.
    """

    out: torch.Tensor
    bias: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    eps: float = 1e-6
    norm_out: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def adds(self) -> bool:
        """Whether anything is added to the sum."""
        return self.bias is not None or self.addend is not None

    @property
    def has_norm(self) -> bool:
        """Whether the norm of the result is taken."""
        return self.norm_out is not None or self.codes is not None


#: Memory of a grouped call: which of the tensors of a run it lies in, and how many bytes behind the beginning.
Place = tuple[int, int]


class GroupedCall(NamedTuple):
    """One call of a group: a `Combine` with places instead of tensors.

    The residual that is added and the one that receives the error are given on their own. ``payload_id`` makes the key
    of the random numbers, together with the rank and the seed of a run.
    """

    numel: int
    payloads: tuple[Place, ...] = ()
    position: int = 0
    local: Place | None = None
    local_dtype: torch.dtype | None = None  # None: the group's
    residual_in: Place | None = None
    residual_out: Place | None = None
    divisor: int = 1
    op: str = "sum"
    payload_id: int = 0
    offset: int = 0
    payload_out: Place | None = None
    out: Place | None = None
    out_dtype: torch.dtype | None = None  # None: the group's


class CallGroup(NamedTuple):
    """Calls of a codec on tensors of ``dtype``, made by ``rank``, that do not depend on each other."""

    codec: Codec
    dtype: torch.dtype
    rank: int
    calls: tuple[GroupedCall, ...]

    def native(self) -> tuple[bytes, int, list[tuple[object, ...]], int]:
        """The arguments of a native module's ``GroupedCalls``."""
        calls = []
        for call in self.calls:
            fields: dict[str, object] = call._asdict()
            fields["op"] = OPERATIONS[call.op]
            fields["local_dtype"] = ELEMENT_TYPES[call.local_dtype or self.dtype]
            fields["out_dtype"] = ELEMENT_TYPES[call.out_dtype or self.dtype]
            calls.append(tuple(fields.values()))
        return self.codec.native_bytes, ELEMENT_TYPES[self.dtype], calls, self.rank


class Tensors:
    """The tensors that the places of grouped calls refer to; None: that memory is not there."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = tensors

    @cached_property
    def addresses(self) -> list[int]:
        """The addresses of the tensors' memory; 0 for None."""
        return [address(tensor) for tensor in self.tensors]

    def at(self, place: Place | None, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The elements that begin at a place, in memory order; None for memory that is not there."""
        tensor = None if place is None else self.tensors[place[0]]
        if place is None or tensor is None:
            return None
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return flat[place[1] : place[1] + numel * dtype.itemsize].view(dtype)


#: Runs a group on tensors, with a seed.
Runner = Callable[[Tensors, int], None]


def address(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's memory, as native code takes it; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def tensor(name: str, value: object, like: torch.Tensor | None = None) -> torch.Tensor:
    """`value`, if it is a contiguous tensor on the CPU or a CUDA device, which is that of `like` if given."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    # is_cpu: comparing devices or their names takes as long as encoding a kilobyte.
    if value.layout != torch.strided or not (value.is_cpu or value.is_cuda):
        raise ValueError(
            f"{name}: expected a dense tensor on cpu or cuda, got {value.layout} on {value.device}"
        )
    if like is not None and not (value.is_cpu and like.is_cpu) and value.device != like.device:
        raise ValueError(
            f"{name}: expected a tensor on {like.device} as the others, got one on {value.device}"
        )
    if not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(value.stride())}")
    return value


def element_type(name: str, codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if `codec` encodes tensors of this type."""
    if dtype not in codec.dtypes:
        valid = ", ".join(str(valid).removeprefix("torch.") for valid in codec.dtypes)
        raise TypeError(f"{name}: codec {str(codec)!r} does not take {dtype}; valid: {valid}")
    return dtype


def floats(
    name: str, value: object, numel: int, *dtypes: torch.dtype, like: torch.Tensor | None = None
) -> torch.Tensor:
    """`value`, if it is a tensor of `numel` elements of one of `dtypes`, on the device of `like`."""
    checked = tensor(name, value, like)
    if checked.dtype not in dtypes:
        valid = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(f"{name}: expected {valid}, got {checked.dtype}")
    if checked.numel() != numel:
        raise ValueError(f"{name}: expected {numel} elements, got {checked.numel()}")
    return checked


def payload(
    name: str,
    value: object,
    codec: Codec,
    numel: int,
    expected: int,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """`value`, if it is a uint8 tensor of the `expected` bytes of `numel` elements, on the device of `like`."""
    checked = tensor(name, value, like)
    if checked.dtype != torch.uint8:
        raise TypeError(f"{name}: expected uint8, got {checked.dtype}")
    if checked.numel() != expected:
        raise ValueError(
            f"{name}: {numel} elements in codec {str(codec)!r} are {expected} bytes, got {checked.numel()}"
        )
    return checked


def require_valid_payload(codec: Codec, payloads: Sequence[torch.Tensor], numel: int) -> None:
    """Raise PayloadCorrupt if a payload holds positions that no encoder of `codec` writes.

    The error names the granule and the reason. The check takes a few nanoseconds per kept element, and nothing for
    codecs without stored positions. Payloads have the right size; those that are not on the CPU are not checked.
    """
    if not codec.stores_positions or codec.in_python:
        return
    for i, payload in enumerate(payloads):
        if payload.is_cpu:
            reason = _C.payload_error(codec.native_bytes, payload.data_ptr(), numel)
            if reason:
                raise errors.PayloadCorrupt(f"payload {i} in codec {str(codec)!r}, {reason}")


def count(name: str, value: object, least: int = 0) -> int:
    """`value`, if it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value


def uint64(name: str, value: object) -> int:
    """`value`, if it is an integer from 0 to 2**64 - 1."""
    checked = count(name, value)
    if checked >= 2**64:
        raise ValueError(f"{name}: expected less than 2**64, got {checked}")
    return checked


def operation(codec: Codec, op: object) -> str:
    """`op`, if it names a reduction that `codec` supports."""
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(f"op: unknown {op!r}; valid: {', '.join(OPERATIONS)}")
    if op not in codec.operations:
        raise ValueError(f"op: codec {str(codec)!r} cannot do {op!r}; valid: {', '.join(codec.operations)}")
    return op


def divisor(value: object, dtype: torch.dtype) -> int:
    """`value`, if it is an integer by which a sum of `dtype` can be divided: 1 for types without fractions."""
    checked = count("divisor", value, 1)
    if checked != 1 and not dtype.is_floating_point:
        raise TypeError(f"divisor: {dtype} cannot be averaged; expected 1, got {checked}")
    return checked
