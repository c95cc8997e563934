"""Reproducible sums: integers with exponents that the ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import BLOCKS, Codec, Layout, block_layout, option, pack
from dtcomm.codecs.cast import Uncompressed

CODE_TYPES = {16: torch.int16, 32: torch.int32}
MIN_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Exact(Codec):
    """``exact``: sums with the same bits in any order of the ranks, by any algorithm and hierarchy.

    The elements of a block are two's complement integers times a common power of two, whose exponent is stored in one
    byte. Collectives that sum first agree on every block's exponent (the largest of the ranks') and then add integers,
    which leave as many bits free as the number of ranks may carry into. A single payload holds the exponents of its
    own tensor.

    Options:
        bits: 32 (default): up to 128 ranks an integer has at least the 24 significant bits of fp32. 16 halves the
            bytes and has 15 bits, less one for each doubling of the ranks.
        block: Elements that share an exponent, a power of two from 16 to 4096. Default 32: an element's precision
            depends on 31 others, and exponents take 1/32 byte per element.

    docs/guides/reproducible-sums.md explains the arithmetic. Paper: Demmel and Nguyen, "Parallel Reproducible
    Summation", IEEE Transactions on Computers 64, 2015, of which this is the case with one bin per block. Reference:
    dtcomm.kernels.reference.reproducible.
    """

    family: ClassVar[int] = 9
    reference: ClassVar[str] = "reproducible"
    reproducible: ClassVar[bool] = True
    has_cuda_kernel: ClassVar[bool] = False
    bits: int = option(default=32, choices=(16, 32))
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
        """The type of the integers."""
        return CODE_TYPES[self.bits]

    def digits(self, ranks: int) -> int:
        """The bits of an integer's magnitude in a sum over `ranks` ranks. ValueError: fewer than 4."""
        digits = self.bits - 1 - (ranks - 1).bit_length()
        if digits < MIN_DIGITS:
            raise ValueError(
                f"codec: {self} leaves {digits} bits for an element in a sum over {ranks} ranks, expected at least "
                f"{MIN_DIGITS}; valid: at most {1 << self.bits - 1 - MIN_DIGITS} ranks, or exact:bits=32"
            )
        return digits

    def blocks(self, numel: int) -> int:
        """The number of exponents of `numel` elements."""
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
