"""Integer codes whose width varies from block to block with the block's energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import BLOCKS, Codec, Layout, option, pack

VARIABLE_GRANULE = 4096
WIDTHS = (2, 3, 4, 5, 6, 7)  # valid means


@dataclass(frozen=True, kw_only=True)
class VariableInteger(Codec):
    """``intv``: integer codes of 0 to 8 bits; blocks with larger elements have wider codes, within a fixed budget.

    Every bit more quarters a block's squared error. So the sum of squared errors is least if all blocks of a granule
    of 4096 elements have about the same error: each doubling of a block's largest element takes one bit more (reverse
    water-filling). The widths of a granule add up to its budget whatever the data, so that payloads have a fixed size,
    and follow from the blocks' scales and one number for each granule, which the payload holds. The gain over a fixed
    width is the greater, the more blocks differ; where all blocks are alike there is none. Rounding is to nearest.

    Options:
        width: The mean width of a code, 2 to 7. Default 5. An element takes 8 / block bits more, for the scale.
        block: Elements that share a width and a scale, a power of two from 16 to 4096. Default 32.

    Papers: reverse water-filling, Cover and Thomas, Elements of Information Theory, section 10.3.3; widths by the
    energy of blocks for gradients, DynamiQ (arXiv:2602.08923). Reference: dtcomm.kernels.reference.variable.

    Example:
        >>> import dtcomm
        >>> 8 * dtcomm.codec("intv").wire_bytes(4096) / 4096
        5.25
    """

    family: ClassVar[int] = 11
    reference: ClassVar[str] = "variable"
    blocks_compete: ClassVar[bool] = True
    width: int = option(default=5, choices=WIDTHS)
    block: int = option(default=32, valid=BLOCKS)

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or self.width not in WIDTHS:
            raise self._refuse("width")
        self._check_block()

    @property
    def name(self) -> str:
        return "intv"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(
            granule=VARIABLE_GRANULE, block=self.block, field_bytes=1, fields=1, code_bits=self.width
        )

    def native(self) -> bytes:
        return pack(self.family, bits=self.width, block=self.block)
