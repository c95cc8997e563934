"""Floats of 8 and 4 bits: with a scale per block (fp8), the OCP Microscaling (MX) formats 1.0, and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import (
    BLOCKS,
    NVFP4_GRANULE,
    SCALE_BYTES,
    Codec,
    Layout,
    block_layout,
    option,
)

MX_BLOCK = 32
NVFP4_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class Float8(Codec):
    """``fp8_e4m3``, ``fp8_e5m2``, ``fp8_e3m4``: an 8-bit float per element; the elements of a block share a scale.

    e4m3 has 4 significant bits and steps that shrink with the number down to 2^-15 of the block's largest element. e5m2
    has 3 and goes down to 2^-31; e3m4 has 5 and goes down to 2^-7. Small numbers keep their precision next to large
    ones, unlike in int8, so blocks may be longer. e3m4 has half the error of e4m3 where most elements lie within 2^-7
    of their block's largest, as in activations, weights and gradients. Use e4m3 for a wider range, e5m2 for blocks
    whose elements lie many orders of magnitude apart.

    Options:
        block: Elements that share a scale, a power of two from 16 to 4096. Default 128: a bf16 scale adds 1.6 %.
        scale: The type of scales: bf16 (default) or fp32. Both have the range of fp32.
        round: nearest (default) or stochastic. Nearest has half the squared error; error feedback removes its bias.

    Attributes:
        element: e4m3, e5m2 or e3m4, from the codec's name.

    Format: OCP 8-bit Floating Point Specification (OFP8) 1.0 for e4m3 and e5m2; e3m4 follows e4m3, with a bit of the
    exponent moved to the mantissa. Reference: dtcomm.kernels.reference.minifloat.
    """

    family: ClassVar[int] = 4
    reference: ClassVar[str] = "minifloat"
    element: str
    block: int = option(default=128, valid=BLOCKS)
    scale: str = option(default="bf16", choices=("bf16", "fp32"))
    round: str = option(default="nearest", choices=("nearest", "stochastic"))

    def __post_init__(self) -> None:
        if self.element not in ("e4m3", "e5m2", "e3m4"):
            raise ValueError(f"element: expected e4m3, e5m2 or e3m4, got {self.element}")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"fp8_{self.element}"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(self.block, SCALE_BYTES[self.scale], 8)


@dataclass(frozen=True, kw_only=True)
class Mx(Codec):
    """The base of the MX formats: blocks of 32 small floats share a power of two, stored in one byte (E8M0).

    Block and scale are those of the OCP standard, so hardware for these formats can read payloads. A scale that is a
    power of two cannot map a block's largest element to the largest number: up to one bit of range is lost against
    ``fp8_e4m3``, and the largest elements may be cut by an eighth (mxfp8) or a quarter (mxfp4). Rounding is to
    nearest, as the standard demands.
    """

    family: ClassVar[int] = 5
    reference: ClassVar[str] = "minifloat"
    block: ClassVar[int] = MX_BLOCK
    code_bits: ClassVar[int]
    element: str
    rotate: str = option(default="none", choices=("none", "hadamard"))

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(self.block, 1, self.code_bits)


@dataclass(frozen=True, kw_only=True)
class Mxfp8(Mx):
    """``mxfp8``: 8.25 bits per element, 32 8-bit floats with a common power of two.

    Options:
        element: e4m3 (default) for precision; e5m2 for blocks whose elements lie many orders of magnitude apart.
        rotate: none (default) or hadamard: encode a randomized Hadamard transform of each block.

    Format: OCP Microscaling Formats (MX) 1.0. Reference: dtcomm.kernels.reference.minifloat.
    """

    codec_name: ClassVar[str] = "mxfp8"
    code_bits: ClassVar[int] = 8
    element: str = option(default="e4m3", choices=("e4m3", "e5m2"))


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Mx):
    """``mxfp4``: 4.25 bits per element, 32 4-bit floats with a common power of two.

    An element is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 times the scale, or a negative of these. Gradients need error feedback.

    Options:
        rotate: none (default) or hadamard: encode a randomized Hadamard transform of each block.

    Attributes:
        element: Always e2m1.

    Format: OCP Microscaling Formats (MX) 1.0. Reference: dtcomm.kernels.reference.minifloat.
    """

    codec_name: ClassVar[str] = "mxfp4"
    code_bits: ClassVar[int] = 4
    element: str = "e2m1"

    def __post_init__(self) -> None:
        if self.element != "e2m1":
            raise ValueError(f"element: expected e2m1, got {self.element}")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Codec):
    """``nvfp4``: 4.53 bits per element, 16 4-bit floats with a scale in e4m3, and an fp32 scale for each 4096 elements.

    An element is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 times the scale of its block, or a negative of these. Blocks are half as
    long as those of ``mxfp4`` and their scales have a mantissa, so the error is less. Gradients need error feedback.

    NVIDIA's format has one fp32 scale per tensor. Here each granule of 4096 elements has one. The scale of a tensor
    would need a pass over all of it before the first element can be encoded, and parts of a payload could not be
    decoded alone. A granule is a tensor of NVFP4 of 4096 elements, and an outlier costs the range of its own granule
    only. There are no options: rounding is to nearest, as a stochastic one would be biased where the largest elements
    saturate.

    Attributes:
        element: Always e2m1.

    Format: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, 2025. Reference:
    dtcomm.kernels.reference.minifloat.
    """

    codec_name: ClassVar[str] = "nvfp4"
    family: ClassVar[int] = 10
    block: ClassVar[int] = NVFP4_BLOCK
    reference: ClassVar[str] = "minifloat"
    element: str = "e2m1"

    def __post_init__(self) -> None:
        if self.element != "e2m1":
            raise ValueError(f"element: expected e2m1, got {self.element}")

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(
            granule=NVFP4_GRANULE, block=self.block, field_bytes=1, fields=1, code_bits=4, trailer=4
        )
