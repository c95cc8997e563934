"""OCP Microscaling (MX) formats 1.0: 32 small floats share a power of two of one byte.

The block and the scale are the standard's, so that payloads are what hardware for these formats reads. A scale that is
a power of two cannot put a block's largest element at the largest number: up to one bit of the element's range is
lost against `fp8_e4m3`, and the largest elements may be cut by an eighth (`mxfp8`) or a quarter (`mxfp4`). There is
no option for rounding: the standard asks for the nearest number. Gradients in `mxfp4` want error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import ELEMENTS, Codec, Layout, block_layout, option, pack

MX_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Mx(Codec):
    """Blocks of 32 under a scale of E8M0; `element` is the format of an element, of `code_bits` bits."""

    family: ClassVar[int] = 5
    code_bits: ClassVar[int]
    element: str
    rotate: str = option(default="none", valid="none, hadamard")

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(MX_BLOCK, 1, self.code_bits)

    def native(self) -> bytes:
        rotate = self.rotate == "hadamard"
        return pack(self.family, element=ELEMENTS[self.element], rotate=rotate, block=MX_BLOCK)


@dataclass(frozen=True, kw_only=True)
class Mxfp8(Mx):
    """8-bit elements: e4m3 for precision, e5m2 for blocks whose elements lie many orders of magnitude apart."""

    code_bits: ClassVar[int] = 8
    element: str = option(default="e4m3", valid="e4m3, e5m2")

    def __post_init__(self) -> None:
        if self.element not in ("e4m3", "e5m2"):
            raise self._refuse("element")
        self._check_block()

    @property
    def name(self) -> str:
        return "mxfp8"


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Mx):
    """4-bit elements: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times the scale, and their negatives."""

    code_bits: ClassVar[int] = 4
    element: str = "e2m1"

    def __post_init__(self) -> None:
        if self.element != "e2m1":
            raise ValueError(f"element: expected e2m1, got {self.element}")
        self._check_block()

    @property
    def name(self) -> str:
        return "mxfp4"
