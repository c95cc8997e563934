"""Integers on a grid that the ranks agree on: sums with the same bits in any order.

A block's elements are integers times a power of two. A collective that adds up first agrees on every block's power of
two (the largest of the ranks' own) and then adds integers, with as many bits left free as the number of ranks may
carry into: no order of additions, no cutting into chunks and no hierarchy changes a bit of the sum.
docs/guides/reproducible-sums.md has
the arithmetic. Sums by integers on a common exponent: Demmel and Nguyen, "Parallel Reproducible Summation", IEEE
Transactions on Computers 64, 2015, of which this is the case with one bin per block.

The defaults. `bits=32`: up to 128 ranks an integer has at least the 24 digits that fp32 has. `bits=16` halves the
bytes, and has 15 less one for each doubling of the ranks. `block=32`: an element's precision depends on 31 others, and
the exponents take a 32nd of a byte an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import BLOCKS, Codec, Layout, block_layout, option, pack
from dtcomm.codecs.cast import Uncompressed

CODE_TYPES = {16: torch.int16, 32: torch.int32}
LEAST_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Exact(Codec):
    """Two's complement integers of `bits` bits; a block shares an exponent of one byte. Encoded alone: one rank's."""

    family: ClassVar[int] = 9
    reproducible: ClassVar[bool] = True
    has_cuda_kernel: ClassVar[bool] = False
    bits: int = option(default=32, valid="16, 32")
    block: int = option(default=32, valid=BLOCKS)

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in CODE_TYPES:
            raise self._refuse("bits")
        self._check_block()

    @property
    def name(self) -> str:
        return "exact"

    @property
    def needs_agreement(self) -> bool:
        return True

    @property
    def code_type(self) -> torch.dtype:
        """What the integers are added up in."""
        return CODE_TYPES[self.bits]

    def digits(self, ranks: int) -> int:
        """Bits of an element's magnitude where the integers of so many ranks are to be added.

        Raises ValueError where that leaves fewer than 4.
        """
        found = self.bits - 1 - (ranks - 1).bit_length()
        if found < LEAST_DIGITS:
            raise ValueError(
                f"codec: {self} leaves {found} bits for an element where {ranks} ranks add up, expected at least "
                f"{LEAST_DIGITS}; valid: at most {1 << self.bits - 1 - LEAST_DIGITS} ranks, or exact:bits=32"
            )
        return found

    def blocks(self, numel: int) -> int:
        """How many exponents `numel` elements have."""
        return -(-numel // self.block)

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(self.block, 1, self.bits)

    def sum_messages(self, numel: int) -> list[tuple[int, Codec, torch.dtype]]:
        return [
            (self.blocks(numel), Uncompressed(), torch.uint8),
            (numel, Uncompressed(), self.code_type),
        ]

    def native(self) -> bytes:
        return pack(self.family, bits=self.bits, block=self.block)
