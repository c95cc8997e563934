"""8-bit floats with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import (
    BLOCKS,
    ELEMENTS,
    SCALE_BYTES,
    SCALES,
    Codec,
    Layout,
    block_layout,
    option,
    pack,
)


@dataclass(frozen=True, kw_only=True)
class Float8(Codec):
    """``fp8_e4m3`` and ``fp8_e5m2``: an OCP 8-bit float per element; the elements of a block share a scale.

    e4m3 has 4 significant bits and steps that shrink with the number down to 2^-15 of the block's largest element;
    e5m2 has 3 and goes down to 2^-31. Small numbers keep their precision beside large ones, unlike in int8, so blocks
    may be longer. Use e4m3 for gradients (the scale supplies the range), e5m2 for blocks whose elements lie many
    orders of magnitude apart.

    Options:
        block: Elements that share a scale, a power of two from 16 to 4096. Default 128: a bf16 scale adds 1.6 %.
        scale: The type of scales: bf16 (default) or fp32. Both have the range of fp32.
        round: nearest (default) or stochastic. Nearest has half the error; error feedback removes its bias.

    Attributes:
        element: e4m3 or e5m2, from the codec's name.

    Format: OCP 8-bit Floating Point Specification (OFP8) 1.0. Reference: dtcomm.kernels.reference.float8.
    """

    family: ClassVar[int] = 4
    reference: ClassVar[str] = "float8"
    element: str
    block: int = option(default=128, valid=BLOCKS)
    scale: str = option(default="bf16", choices=("bf16", "fp32"))
    round: str = option(default="nearest", choices=("nearest", "stochastic"))

    def __post_init__(self) -> None:
        if self.element not in ("e4m3", "e5m2"):
            raise ValueError(f"element: expected e4m3 or e5m2, got {self.element}")
        self._check_block()

    @property
    def name(self) -> str:
        return f"fp8_{self.element}"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(self.block, SCALE_BYTES[self.scale], 8)

    def native(self) -> bytes:
        return pack(
            self.family,
            scale=SCALES[self.scale],
            stochastic=self.round == "stochastic",
            element=ELEMENTS[self.element],
            block=self.block,
        )
