"""OCP Microscaling (MX) formats 1.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import ELEMENTS, Codec, Layout, block_layout, option, pack

MX_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Mx(Codec):
    """The base of the MX formats: blocks of 32 small floats share a power of two, stored in one byte (E8M0).

    Block and scale are those of the OCP standard, so hardware for these formats can read payloads. A scale that is a
    power of two cannot map a block's largest element to the largest number: up to one bit of range is lost against
    ``fp8_e4m3``, and the largest elements may be cut by an eighth (mxfp8) or a quarter (mxfp4). Rounding is to
    nearest, as the standard demands.
    """

    family: ClassVar[int] = 5
    reference: ClassVar[str] = "mx"
    code_bits: ClassVar[int]
    element: str
    rotate: str = option(default="none", choices=("none", "hadamard"))

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(MX_BLOCK, 1, self.code_bits)

    def native(self) -> bytes:
        rotate = self.rotate == "hadamard"
        return pack(self.family, element=ELEMENTS[self.element], rotate=rotate, block=MX_BLOCK)


@dataclass(frozen=True, kw_only=True)
class Mxfp8(Mx):
    """``mxfp8``: 8.25 bits per element, 32 8-bit floats with a common power of two.

    Options:
        element: e4m3 (default) for precision; e5m2 for blocks whose elements lie many orders of magnitude apart.
        rotate: none (default) or hadamard: encode a randomized Hadamard transform of each block.

    Format: OCP Microscaling Formats (MX) 1.0. Reference: dtcomm.kernels.reference.mx.
    """

    code_bits: ClassVar[int] = 8
    element: str = option(default="e4m3", choices=("e4m3", "e5m2"))

    def __post_init__(self) -> None:
        if self.element not in ("e4m3", "e5m2"):
            raise self._refuse("element")
        self._check_block()

    @property
    def name(self) -> str:
        return "mxfp8"


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Mx):
    """``mxfp4``: 4.25 bits per element, 32 4-bit floats with a common power of two.

    An element is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 times the scale, or a negative of these. Gradients need error feedback.

    Options:
        rotate: none (default) or hadamard: encode a randomized Hadamard transform of each block.

    Attributes:
        element: Always e2m1.

    Format: OCP Microscaling Formats (MX) 1.0. Reference: dtcomm.kernels.reference.mx.
    """

    code_bits: ClassVar[int] = 4
    element: str = "e2m1"

    def __post_init__(self) -> None:
        if self.element != "e2m1":
            raise ValueError(f"element: expected e2m1, got {self.element}")
        self._check_block()

    @property
    def name(self) -> str:
        return "mxfp4"
