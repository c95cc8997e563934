"""Codecs whose elements keep their own value or are cast: none, lossless, fp16, bf16, and exact sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from dtcomm.codecs.base import (
    BLOCKS,
    ELEMENT_TYPES,
    FLOAT_TYPES,
    ROUNDINGS,
    Codec,
    Layout,
    block_layout,
    count,
    option,
)

LOSSLESS_HEAD_BYTES = 16
CODE_TYPES = {16: torch.int16, 32: torch.int32}  # of exact
MIN_DIGITS = 4
ROUNDED = "exact:rounded=true"
MIN_SCATTERED_ELEMENTS = 2**16  # of its all_reduce: below, another stage takes more time than it saves


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Codec):
    """``none``: the elements in the tensor's own type, uncompressed.

    It takes every element type. fp32, fp16 and bf16 are summed in fp32; other types in their own type, integers
    wrapping. Reference: dtcomm.kernels.reference.floats.
    """

    codec_name: ClassVar[str] = "none"
    family: ClassVar[int] = 0
    reference: ClassVar[str] = "floats"
    elementwise: ClassVar[bool] = True

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        if dtype not in ELEMENT_TYPES:
            valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENT_TYPES)
            raise TypeError(f"dtype: codec 'none' does not take {dtype}; valid: {valid}")
        return Layout(code_bits=8 * dtype.itemsize)

    def lossless(self, dtype: torch.dtype) -> bool:
        return True

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(ELEMENT_TYPES)


@dataclass(frozen=True, kw_only=True)
class _Cast(Codec):
    reference: ClassVar[str] = "floats"
    elementwise: ClassVar[bool] = True
    element_type: ClassVar[torch.dtype]

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(code_bits=16)

    def lossless(self, dtype: torch.dtype) -> bool:
        return dtype == self.element_type

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.element_type

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max")


@dataclass(frozen=True, kw_only=True)
class Fp16(_Cast):
    """``fp16``: IEEE binary16, 16 bits per element.

    It has 11 significant bits and a range of 6e-8 to 65504; larger numbers become Inf. Rounding is to nearest, ties
    to even. Reference: dtcomm.kernels.reference.floats.
    """

    codec_name: ClassVar[str] = "fp16"
    family: ClassVar[int] = 1
    element_type: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True, kw_only=True)
class Bf16(_Cast):
    """``bf16``: bfloat16, 16 bits per element.

    It has 8 significant bits and the range of fp32. Reference: dtcomm.kernels.reference.floats.

    Attributes:
        round: ``nearest`` (default), ties to even, or ``stochastic``: away from zero with the probability of the
            distance from the neighbour nearer to zero, so that errors have mean zero and add up like noise.
    """

    codec_name: ClassVar[str] = "bf16"
    family: ClassVar[int] = 2
    element_type: ClassVar[torch.dtype] = torch.bfloat16

    round: str = option(default="nearest", choices=ROUNDINGS)

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum", "min", "max") if self.round == "nearest" else ("sum",)


@dataclass(frozen=True, kw_only=True)
class Lossless(Codec):
    """``lossless``: bf16 and fp32 with every bit kept, in fewer bytes where exponents are similar, as in weights.

    The exponents of each 4096 elements become codes of 1 to 4 bits, which stand for neighbouring exponents; the others
    are stored apart. Signs and mantissas do not shrink. A Gaussian tensor takes 11.2 bits per element in bf16 (30 %
    less) and 27.2 bits in fp32 (15 % less). A tensor that would not shrink is sent as it is, with a head of 16 bytes.

    The length of a payload depends on the data, and ``wire_bytes`` is its upper bound. So the codec serves what copies
    whole payloads: `dtcomm.encode` and `dtcomm.decode`, for checkpoints, and broadcast, all_gather, gather, scatter,
    all_to_all, send and recv, which exchange the lengths first. Reductions refuse it: they add payloads piece by piece
    in memory of a fixed size. FSDP's parameters may be sent in it. It has no kernels for CUDA tensors.

    Published work on the same idea: DFloat11 (Zhang et al., "70% Size, 100% Accuracy", arXiv:2504.11651, 2025), with
    Huffman codes; codes of a fixed width decode faster. Reference: dtcomm.kernels.reference.lossless.
    """

    codec_name: ClassVar[str] = "lossless"
    reference: ClassVar[str] = "lossless"
    has_cuda_kernel: ClassVar[bool] = False
    variable_length: ClassVar[bool] = True

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        self._refuse_layout()

    def native(self) -> bytes:
        self._refuse_layout()

    def lossless(self, dtype: torch.dtype) -> bool:
        return True

    @property
    def operations(self) -> tuple[str, ...]:
        return ()

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16)

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """The largest size of a payload in bytes; most payloads are shorter.

        Args:
            numel: Elements of the tensor.
            dtype: The type of the tensor.

        Raises:
            TypeError: `numel` is not an int.
            ValueError: `numel` is negative.
        """
        return LOSSLESS_HEAD_BYTES + numel * dtype.itemsize if count(numel) else 0

    def _refuse_layout(self) -> NoReturn:
        raise TypeError("codec 'lossless' has no layout: the length of its payloads depends on the data")


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

    codec_name: ClassVar[str] = "exact"
    family: ClassVar[int] = 9
    reference: ClassVar[str] = "reproducible"
    reproducible: ClassVar[bool] = True
    has_cuda_kernel: ClassVar[bool] = False
    bits: int = option(default=32, choices=(16, 32))
    block: int = option(default=32, valid=BLOCKS)

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

    def sum_messages(
        self, numel: int, collective: str = "all_reduce", dtype: torch.dtype | None = None
    ) -> list[tuple[int, Codec, torch.dtype]]:
        return [
            (self.blocks(numel), Uncompressed(), torch.uint8),
            (numel, Uncompressed(), self.code_type),
        ]


@dataclass(frozen=True, kw_only=True)
class RoundedExact(Uncompressed):
    """``exact:rounded=true``: sums that are the exact sum, rounded once; hence those of any other correct summation.

    Collectives that sum agree on the range of bits of every block and add as many digits as it takes, as integers: of
    32 bits, and of 16 bits above them where these suffice. A large all_reduce sends each rank the digits of its shard,
    and gathers the rounded results. How much is sent depends on the data; `sum_messages` has the usual case of up to
    16 ranks, and of an all_reduce that is no tree. Every summing call waits for the ranks' agreement when it is issued,
    also with ``async_op=True``. Where nothing is summed, tensors are sent uncompressed.

    It takes no other options. Attributes: ``block``, the elements that share a range of bits, 32.

    docs/how-it-works/exact-sums.md explains the arithmetic. Reference: dtcomm.kernels.reference.rounded_sum.
    """

    codec_name: ClassVar[str] = "exact"
    reproducible: ClassVar[bool] = True
    block: ClassVar[int] = 32

    def native(self) -> bytes:
        return Uncompressed().native()

    def __str__(self) -> str:
        return ROUNDED

    @property
    def needs_agreement(self) -> bool:
        return True

    @property
    def operations(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return FLOAT_TYPES

    def blocks(self, numel: int) -> int:
        """The number of ranges of `numel` elements."""
        return -(-numel // self.block)

    def sum_messages(
        self, numel: int, collective: str = "all_reduce", dtype: torch.dtype | None = None
    ) -> list[tuple[int, Codec, torch.dtype]]:
        whole, itemsize = Uncompressed(), 4 if dtype is None else dtype.itemsize
        size = 6 if itemsize == 4 else 4  # bytes of the digits of an element
        if collective == "all_reduce" and numel >= MIN_SCATTERED_ELEMENTS:
            # A reduce_scatter of digits and an all_gather of results send half an all_reduce each.
            size = (size + itemsize) // 2
        return [(2 * self.blocks(numel), whole, torch.uint8), (size * numel, whole, torch.uint8)]
