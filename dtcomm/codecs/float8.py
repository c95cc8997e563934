"""8-bit floats with a scale per block.

`fp8_e4m3` has 4 significant bits and steps that shrink with the number down to 2^-15 of the block's largest element;
`fp8_e5m2` has 3 and goes down to 2^-31. Where int8 spends its levels evenly, they keep small numbers beside large
ones, so blocks may be longer: `block=128` costs 1.6 % for `scale=bf16`, which has the range of fp32, so that blocks
of 1e-30 and of 1e30 survive. `round=nearest`: half the error of stochastic rounding; what bias is left is for error
feedback to remove. Gradients want e4m3 (precision; the scale supplies the range), e5m2 is for blocks whose elements
lie many orders of magnitude apart.
"""

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
    """An OCP 8-bit float per element (`element`: e4m3, which has no Inf, or e5m2); a block shares a scale."""

    family: ClassVar[int] = 4
    element: str
    block: int = option(default=128, valid=BLOCKS)
    scale: str = option(default="bf16", valid="bf16, fp32")
    round: str = option(default="nearest", valid="nearest, stochastic")

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
