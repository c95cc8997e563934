"""What the verbs demand of their arguments: errors name the argument, what was given and what is valid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C, errors
from dtcomm.codecs import Codec
from dtcomm.kernels.types import OPERATIONS


def tensor(name: str, value: object, like: torch.Tensor | None = None) -> torch.Tensor:
    """`value` as a dense tensor on the CPU or a CUDA device: that of `like`, if given."""
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
    """A type whose tensors `codec` takes."""
    if dtype not in codec.dtypes:
        valid = ", ".join(str(each).removeprefix("torch.") for each in codec.dtypes)
        raise TypeError(f"{name}: codec {str(codec)!r} does not take {dtype}; valid: {valid}")
    return dtype


def floats(
    name: str, value: object, numel: int, *dtypes: torch.dtype, like: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor of `numel` elements of one of `dtypes`, on the device of `like`."""
    checked = tensor(name, value, like)
    if checked.dtype not in dtypes:
        valid = ", ".join(dict.fromkeys(str(each).removeprefix("torch.") for each in dtypes))
        raise TypeError(f"{name}: expected {valid}, got {checked.dtype}")
    if checked.numel() != numel:
        raise ValueError(f"{name}: expected {numel} elements, got {checked.numel()}")
    return checked


def payload(
    name: str,
    value: object,
    codec: Codec,
    numel: int,
    dtype: torch.dtype,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """A uint8 tensor of exactly the bytes that `codec` makes of `numel` elements, on the device of `like`."""
    checked = tensor(name, value, like)
    if checked.dtype != torch.uint8:
        raise TypeError(f"{name}: expected uint8, got {checked.dtype}")
    expected = codec.wire_bytes(numel, dtype)
    if checked.numel() != expected:
        raise ValueError(
            f"{name}: {numel} elements in codec {str(codec)!r} are {expected} bytes, got {checked.numel()}"
        )
    return checked


def count(name: str, value: object, least: int = 0) -> int:
    """An integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value


def word(name: str, value: object) -> int:
    """An unsigned integer of 64 bits."""
    checked = count(name, value)
    if checked >= 2**64:
        raise ValueError(f"{name}: expected less than 2**64, got {checked}")
    return checked


def operation(codec: Codec, op: object) -> str:
    """A reduction that `codec` can do."""
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(f"op: unknown {op!r}; valid: {', '.join(OPERATIONS)}")
    if op not in codec.operations:
        raise ValueError(f"op: codec {str(codec)!r} cannot do {op!r}; valid: {', '.join(codec.operations)}")
    return op


def divisor(value: object, dtype: torch.dtype) -> int:
    """What the sum is divided by; 1 for types that have no fractions."""
    checked = count("divisor", value, 1)
    if checked != 1 and not dtype.is_floating_point:
        raise TypeError(f"divisor: {dtype} cannot be averaged; expected 1, got {checked}")
    return checked


def require_valid_payload(codec: Codec, payloads: Sequence[torch.Tensor], numel: int) -> None:
    """Raise PayloadCorrupt if a payload holds positions that no encoder of ``codec`` writes.

    The error names the granule and the reason. The check takes a few nanoseconds per kept element, and nothing for
    codecs without stored positions. Payloads have the right size; those that are not on the CPU are not checked.
    """
    if not codec.stores_positions:
        return
    for i, payload in enumerate(payloads):
        if payload.device.type == "cpu":
            reason = _C.why_corrupt(codec.native(), payload.data_ptr(), numel)
            if reason:
                raise errors.PayloadCorrupt(f"payload {i} in codec {str(codec)!r}, {reason}")
