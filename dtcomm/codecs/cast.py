"""Codecs without scales: the tensor itself, and IEEE casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import ELEMENT_TYPES, ROUNDINGS, Codec, Layout, option, pack


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Codec):
    """``none``: the elements in the tensor's own type, uncompressed.

    It takes every element type. fp32, fp16 and bf16 are summed in fp32; other types in their own type, integers
    wrapping. Reference: dtcomm.kernels.reference.floats.
    """

    family: ClassVar[int] = 0
    reference: ClassVar[str] = "floats"
    elementwise: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "none"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        if dtype not in ELEMENT_TYPES:
            valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENT_TYPES)
            raise TypeError(f"dtype: codec 'none' does not take {dtype}; valid: {valid}")
        return Layout(code_bits=8 * dtype.itemsize)

    def lossless(self, dtype: torch.dtype) -> bool:
        return True

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(ELEMENT_TYPES)


@dataclass(frozen=True, kw_only=True)
class _Cast(Codec):
    reference: ClassVar[str] = "floats"
    elementwise: ClassVar[bool] = True
    element_type: ClassVar[torch.dtype]

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(code_bits=16)

    def lossless(self, dtype: torch.dtype) -> bool:
        return dtype == self.element_type

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.element_type

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max")


@dataclass(frozen=True, kw_only=True)
class Fp16(_Cast):
    """``fp16``: IEEE binary16, 16 bits per element.

    It has 11 significant bits and a range of 6e-8 to 65504; larger numbers become Inf. Rounding is to nearest, ties
    to even. Reference: dtcomm.kernels.reference.floats.
    """

    family: ClassVar[int] = 1
    element_type: ClassVar[torch.dtype] = torch.float16

    @property
    def name(self) -> str:
        return "fp16"


@dataclass(frozen=True, kw_only=True)
class Bf16(_Cast):
    """``bf16``: bfloat16, 16 bits per element.

    It has 8 significant bits and the range of fp32. Reference: dtcomm.kernels.reference.floats.

    Attributes:
        round: ``nearest`` (default), ties to even, or ``stochastic``: away from zero with the probability of the
            distance from the neighbour nearer to zero, so that errors have mean zero and add up like noise.
    """

    family: ClassVar[int] = 2
    element_type: ClassVar[torch.dtype] = torch.bfloat16

    round: str = option(default="nearest", choices=ROUNDINGS)

    def __post_init__(self) -> None:
        self._check_block()

    def native(self) -> bytes:
        return pack(self.family, stochastic=self.round == "stochastic")

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max") if self.round == "nearest" else ("sum",)

    @property
    def name(self) -> str:
        return "bf16"
