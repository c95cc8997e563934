"""Codecs without scales: the tensor itself, and IEEE casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import ELEMENT_TYPES, Codec, Layout


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Codec):
    """`none`: the elements in the tensor's own type."""

    family: ClassVar[int] = 0
    elementwise: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "none"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        if dtype not in ELEMENT_TYPES:
            valid = ", ".join(str(each).removeprefix("torch.") for each in ELEMENT_TYPES)
            raise TypeError(f"dtype: codec 'none' does not take {dtype}; valid: {valid}")
        return Layout(code_bits=8 * dtype.itemsize)

    def lossless(self, dtype: torch.dtype) -> bool:
        return True

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(ELEMENT_TYPES)


@dataclass(frozen=True, kw_only=True)
class _Cast(Codec):
    elementwise: ClassVar[bool] = True
    keeps: ClassVar[tuple[torch.dtype, ...]]

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(code_bits=16)

    def lossless(self, dtype: torch.dtype) -> bool:
        return dtype in self.keeps

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max")


@dataclass(frozen=True, kw_only=True)
class Fp16(_Cast):
    """IEEE binary16: 11 significant bits, 6e-8 to 65504; larger numbers become Inf."""

    family: ClassVar[int] = 1
    keeps: ClassVar[tuple[torch.dtype, ...]] = (torch.float16,)

    @property
    def name(self) -> str:
        return "fp16"


@dataclass(frozen=True, kw_only=True)
class Bf16(_Cast):
    """bfloat16: 8 significant bits, the range of fp32."""

    family: ClassVar[int] = 2
    keeps: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @property
    def name(self) -> str:
        return "bf16"
