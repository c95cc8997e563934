"""Integer codes of 2 to 8 bits, codes whose width varies from block to block, and signs; with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import (
    BLOCKS,
    SCALE_BYTES,
    VARIABLE_GRANULE,
    Codec,
    Layout,
    block_layout,
    option,
    pack,
)

MEAN_WIDTHS = (2, 3, 4, 5, 6, 7)  # of intv


@dataclass(frozen=True, kw_only=True)
class Integer(Codec):
    """``int8`` to ``int2``: integer codes; the elements of a block share a scale and, if asymmetric, a zero point.

    A symmetric block's code is ``round(x / scale)``, with the scale that maps its largest magnitude to the largest
    code. The defaults are for gradients.

    Options:
        block: Elements that share a scale, a power of two from 16 to 4096. Default 32: one large element spoils the
            resolution of 31 others, and a 2-byte scale per block adds 6 % to int8.
        scale: The type of scales: bf16 (default) or fp32. Both have the range of fp32.
        symmetric: true (default): codes are centred on zero, which is exact. false: codes count from a zero point.
        round: nearest (default) or stochastic. Nearest has half the squared error; error feedback removes its bias.
        rotate: none (default) or hadamard: encode a randomized Hadamard transform of each block, which spreads
            outliers. It helps at 4 bits and fewer, and takes time.
        spikes: 0 (default) or 1: store each block's smallest and largest element apart, in 6 bytes per block with
            bf16 scales, so that codes cover the range of the others.

    Attributes:
        bits: Bits of a code, 2 to 8, from the codec's name.

    Papers: QSGD (Alistarh et al. 2017) for block-wise scaling and stochastic rounding; Suresh et al. 2017 and QuaRot
    (Ashkboos et al. 2024) for rotation; Flash Communication V2 (Li et al. 2025) for bit planes and spikes. Reference:
    dtcomm.kernels.reference.integer; `dtcomm.kernels.reference` itself rotates.
    """

    family: ClassVar[int] = 3
    reference: ClassVar[str] = "integer"
    bits: int
    block: int = option(default=32, valid=BLOCKS)
    scale: str = option(default="bf16", choices=("bf16", "fp32"))
    symmetric: bool = option(default=True, choices=(True, False))
    round: str = option(default="nearest", choices=("nearest", "stochastic"))
    rotate: str = option(default="none", choices=("none", "hadamard"))
    spikes: int = option(default=0, choices=(0, 1))

    def __post_init__(self) -> None:
        known = isinstance(self.bits, int) and not isinstance(self.bits, bool)
        if not known or not 2 <= self.bits <= 8:
            raise ValueError(f"bits: expected 2 to 8, got {self.bits}")
        super().__post_init__()

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def levels(self) -> int:
        """The largest code. The smallest one is its negative if symmetric, else 0."""
        return (1 << (self.bits - 1 if self.symmetric else self.bits)) - 1

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        field_bytes = SCALE_BYTES[self.scale]
        place_bytes = 1 if self.block <= 256 else 2
        spike_bytes = 2 * (field_bytes + place_bytes) if self.spikes else 0
        fields = 1 if self.symmetric else 2
        return block_layout(self.block, field_bytes, self.bits, fields=fields, spike_bytes=spike_bytes)


@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """``sign``: one bit per element, plus or minus the mean magnitude of its block.

    Use it with error feedback: without a residual the decoded gradient is biased, and training need not converge.

    Options:
        block: Elements that share a scale, a power of two from 16 to 4096. Default 256: a bf16 scale adds 6 %.
        scale: The type of scales: bf16 (default) or fp32. Both have the range of fp32.
        rotate: none (default) or hadamard: encode a randomized Hadamard transform of each block. The squared error is
            then 1 - 2/pi of the data's square for any data (DRIVE).

    Papers: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, with
    one scale per block instead of per tensor; Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS
    2021. Reference: dtcomm.kernels.reference.integer.
    """

    codec_name: ClassVar[str] = "sign"
    family: ClassVar[int] = 6
    reference: ClassVar[str] = "integer"
    block: int = option(default=256, valid=BLOCKS)
    scale: str = option(default="bf16", choices=("bf16", "fp32"))
    rotate: str = option(default="none", choices=("none", "hadamard"))

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(self.block, SCALE_BYTES[self.scale], 1)


@dataclass(frozen=True, kw_only=True)
class VariableInteger(Codec):
    """``intv``: integer codes of 0 to 8 bits; blocks with larger elements have wider codes, within a fixed budget.

    Every bit more quarters a block's squared error. So the sum of squared errors is least if all blocks of a granule of
    4096 elements have about the same error. Each doubling of a block's largest element takes one bit more (reverse
    water-filling). The widths of a granule add up to its budget whatever the data, so that payloads have a fixed size.
    They follow from the blocks' scales and one number for each granule, which the payload holds. The gain over a fixed
    width is the greater, the more blocks differ; where all blocks are equal there is none. Rounding is to nearest.

    Options:
        width: The mean width of a code, 2 to 7. Default 5. An element takes 8 / block bits more, for the scale.
        block: Elements that share a width and a scale, a power of two from 16 to 4096. Default 32.

    Papers: reverse water-filling, Cover and Thomas, Elements of Information Theory, section 10.3.3; widths by the
    energy of blocks for gradients, DynamiQ (arXiv:2602.08923). Reference: dtcomm.kernels.reference.integer.

    Example:
        >>> import dtcomm
        >>> 8 * dtcomm.codec("intv").wire_bytes(4096) / 4096
        5.25
    """

    codec_name: ClassVar[str] = "intv"
    family: ClassVar[int] = 11
    reference: ClassVar[str] = "integer"
    blocks_compete: ClassVar[bool] = True
    width: int = option(default=5, choices=MEAN_WIDTHS)
    block: int = option(default=32, valid=BLOCKS)

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(
            granule=VARIABLE_GRANULE, block=self.block, field_bytes=1, fields=1, code_bits=self.width
        )

    def native(self) -> bytes:
        return pack(self.family, bits=self.width, block=self.block)
