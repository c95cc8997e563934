"""Integer codes with a scale per block.

The defaults are for gradients. `block=32`: one large element spoils the resolution of 31 others and not of
thousands, and 2 bytes a block are 6 % of the payload, which is all that a longer block could save. `scale=bf16`:
the range of fp32, so that blocks of 1e-30 and of 1e30 survive, in half the bytes; its rounding costs at most what
rounding the codes costs anyway. `symmetric=true`: gradients are centred on zero, which is then exact.
`round=nearest`: half the error of stochastic rounding; what bias is left is for error feedback to remove.
`rotate=none`, `spikes=0`: what they gain depends on the data (outliers) and on the bits (4 and fewer); rotation costs
time, spikes cost 6 bytes a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import BLOCKS, SCALE_BYTES, SCALES, Codec, Layout, block_layout, option, pack


@dataclass(frozen=True, kw_only=True)
class Integer(Codec):
    """`bits` (2 to 8) per element; a block of elements shares a scale and, unless symmetric, a zero point."""

    family: ClassVar[int] = 3
    bits: int
    block: int = option(default=32, valid=BLOCKS)
    scale: str = option(default="bf16", valid="bf16, fp32")
    symmetric: bool = option(default=True, valid="true, false")
    round: str = option(default="nearest", valid="nearest, stochastic")
    rotate: str = option(default="none", valid="none, hadamard")
    spikes: int = option(default=0, valid="0, 1")

    def __post_init__(self) -> None:
        known = isinstance(self.bits, int) and not isinstance(self.bits, bool)
        if not known or not 2 <= self.bits <= 8:
            raise ValueError(f"bits: expected 2 to 8, got {self.bits}")
        self._check_block()
        if not isinstance(self.symmetric, bool):
            raise self._refuse("symmetric")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def levels(self) -> int:
        """The largest code; the smallest is its negative where symmetric, otherwise 0."""
        return (1 << (self.bits - 1 if self.symmetric else self.bits)) - 1

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        field_bytes = SCALE_BYTES[self.scale]
        place_bytes = 1 if self.block <= 256 else 2
        spike_bytes = 2 * (field_bytes + place_bytes) if self.spikes else 0
        fields = 1 if self.symmetric else 2
        return block_layout(self.block, field_bytes, self.bits, fields=fields, spike_bytes=spike_bytes)

    def native(self) -> bytes:
        return pack(
            self.family,
            bits=self.bits,
            scale=SCALES[self.scale],
            symmetric=self.symmetric,
            stochastic=self.round == "stochastic",
            rotate=self.rotate == "hadamard",
            spikes=self.spikes == 1,
            block=self.block,
        )
