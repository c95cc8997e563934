"""Argument checks of the verbs. Errors name the argument, what was given and what is valid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C, errors
from dtcomm.codecs import Codec
from dtcomm.kernels.types import OPERATIONS


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
