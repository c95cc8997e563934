"""Sparse codecs: only a part of the elements is sent; with error feedback the rest stays in the residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dtcomm.codecs.base import (
    ELEMENTS,
    POSITION_BITS,
    ROUNDINGS,
    SCALES,
    SPARSE_GRANULE,
    Codec,
    Layout,
    aligned,
    count,
    option,
    pack,
)
from dtcomm.codecs.cast import Bf16, Fp16, Uncompressed
from dtcomm.codecs.integer import Integer

POSITION_BYTES = 4  # with scope=tensor
VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # with scope=tensor
RANDK_HEAD = 8  # bytes of the key from which a granule's positions are drawn
INTEGERS = tuple(f"int{bits}" for bits in range(8, 1, -1))
CASTS: dict[str, Codec] = {"bf16": Bf16(), "fp16": Fp16(), "fp32": Uncompressed()}
VALUES = ", ".join((*CASTS, *INTEGERS))  # for error messages


@dataclass(frozen=True, kw_only=True)
class _Sparse(Codec):
    """The base of sparse codecs: a granule of 4096 elements keeps ``round(ratio * 4096)`` of them, at least one."""

    reference: ClassVar[str] = "sparse"
    sparse: ClassVar[bool] = True
    head: ClassVar[int] = 0
    ratio: float = option(default=0.01, valid="a number above 0, at most 1")
    values: str = option(default="bf16", choices=(*CASTS, *INTEGERS))
    round: str = option(default="nearest", valid="nearest, stochastic (values int8 to int2)")

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)):
            raise self._refuse("ratio")
        if not 0 < self.ratio <= 1:  # NaN is refused, too
            raise self._refuse("ratio")
        object.__setattr__(self, "ratio", float(self.ratio))  # so that 1 and 1.0 print alike
        super().__post_init__()
        if self.round not in ROUNDINGS:
            raise self._refuse("round")
        if self.round == "stochastic" and self.values in CASTS:
            raise ValueError(
                f"{self.name}: option 'round' is stochastic, but values={self.values} is a cast, which rounds to "
                f"nearest; valid with stochastic: values={', '.join(INTEGERS)}"
            )
        self.value_codec()  # refuses what the integer codec refuses

    def value_codec(self) -> Codec:
        """The codec of the kept elements' values."""
        if self.values in CASTS:
            return CASTS[self.values]
        return Integer(bits=int(self.values.removeprefix("int")), round=self.round)

    @property
    def kept(self) -> int:
        """Elements that a whole granule keeps: ratio * 4096 rounded to nearest, ties to even, but at least one."""
        return max(1, round(self.ratio * SPARSE_GRANULE))

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return replace(
            self.value_codec().layout(),
            granule=SPARSE_GRANULE,
            kept=self.kept,
            head=self.head,
            position_bits=self._position_bits(),
        )

    def _position_bits(self) -> int:
        return 0

    def native(self) -> bytes:
        values = self.value_codec()
        if not isinstance(values, Integer):
            return pack(self.family, element=ELEMENTS[self.values], kept=self.kept)
        return pack(
            self.family,
            bits=values.bits,
            scale=SCALES[values.scale],
            symmetric=values.symmetric,
            stochastic=values.round == "stochastic",
            element=ELEMENTS["integer"],
            block=values.block,
            kept=self.kept,
        )


@dataclass(frozen=True, kw_only=True)
class TopK(_Sparse):
    """``topk``: the elements with the largest magnitudes of each granule of 4096, with their positions.

    Of elements of equal magnitude the first are sent. Positions are a list of 12-bit numbers, or a bitmap if that is
    shorter. Use it for gradients with error feedback.

    With ``scope=tensor`` the elements are the largest of everything that is encoded together: of the whole tensor with
    ``one_shot``, of a rank's chunk with other algorithms. That keeps more of gradients whose large elements lie close
    together. Positions then take 32 bits, and torch selects the elements (dtcomm.kernels.eager).

    Options:
        ratio: The part of the elements that is sent, above 0 and at most 1. Default 0.01.
        values: The codec of their values: bf16 (default), fp16, fp32, or int8 to int2.
        round: nearest (default) or stochastic; for integer values.
        scope: What ``ratio`` is a part of: granule (default) or tensor, with values bf16, fp16 or fp32.

    Papers: Lin et al., "Deep Gradient Compression", ICLR 2018. Selection per chunk of 4096, which gives 12-bit
    positions, is that of DeMo and SparseLoCo. Reference: dtcomm.kernels.reference.sparse.
    """

    codec_name: ClassVar[str] = "topk"
    family: ClassVar[int] = 7
    stores_positions: ClassVar[bool] = True
    scope: str = option(default="granule", choices=("granule", "tensor"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_python and self.values not in CASTS:
            raise ValueError(
                f"topk: option 'values' is {self.values}; valid with scope=tensor: {', '.join(CASTS)}"
            )

    @property
    def in_python(self) -> bool:
        return self.scope == "tensor"

    @property
    def granularity(self) -> int:
        return SPARSE_GRANULE

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        self._require_kernel()
        return super().layout(dtype)

    def native(self) -> bytes:
        self._require_kernel()
        return super().native()

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        if not self.in_python:
            return super().wire_bytes(numel, dtype)
        return aligned(self.payload_bytes(count(numel)))

    def payload_bytes(self, numel: int) -> int:
        """With ``scope=tensor``: the size of a payload without its padding."""
        if numel >= 2**31:
            raise ValueError(
                f"numel: {numel}; valid with scope=tensor: less than 2**31, because of the positions"
            )
        return self.kept_of_tensor(numel) * (POSITION_BYTES + VALUE_BYTES[self.values]) if numel else 0

    def kept_of_tensor(self, numel: int) -> int:
        """With ``scope=tensor``: how many of `numel` elements are sent."""
        return max(1, round(self.ratio * numel))

    def _require_kernel(self) -> None:
        if self.in_python:
            raise ValueError(
                f"codec: {str(self)!r} is executed by torch: it has no kernel and no granules; valid where kernels are "
                "needed (simulated ranks, fused kernels): scope=granule"
            )

    def _position_bits(self) -> int:
        return 1 if self.kept * POSITION_BITS > SPARSE_GRANULE else POSITION_BITS

    def lossless(self, dtype: torch.dtype) -> bool:
        keeps_all = self.ratio == 1 if self.in_python else self.kept == SPARSE_GRANULE
        return keeps_all and self.value_codec().lossless(dtype)


@dataclass(frozen=True, kw_only=True)
class RandK(_Sparse):
    """``randk``: elements at random positions, which decoders draw again from a key in the payload.

    Values are scaled by elements / kept elements, which makes the decoding unbiased; with error feedback they are not
    scaled.

    Options:
        ratio: The part of the elements that is sent, above 0 and at most 1. Default 0.01.
        values: The codec of their values: bf16 (default), fp16, fp32, or int8 to int2.
        round: nearest (default) or stochastic; for integer values.
        positions: own (default): every encoding draws its own. shared: in a collective that sums, all ranks draw the
            same positions from the call's seed and add only the values. Payloads have the same layout.

    Papers: Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", and Stich et
    al., "Sparsified SGD with Memory", both NeurIPS 2018. Reference: dtcomm.kernels.reference.sparse.
    """

    codec_name: ClassVar[str] = "randk"
    family: ClassVar[int] = 8
    head: ClassVar[int] = RANDK_HEAD
    positions: str = option(default="own", choices=("own", "shared"))

    @property
    def needs_agreement(self) -> bool:
        return self.positions == "shared"

    def kept_in(self, numel: int) -> int:
        """The number of elements that are sent of a tensor of `numel` elements."""
        layout = self.layout()
        whole, rest = divmod(numel, layout.granule)
        return whole * layout.kept + (layout.kept_of(rest) if rest else 0)

    def sum_messages(
        self, numel: int, collective: str = "all_reduce", dtype: torch.dtype | None = None
    ) -> list[tuple[int, Codec, torch.dtype]]:
        if not self.needs_agreement:
            return super().sum_messages(numel, collective, dtype)
        return [(self.kept_in(numel), self.value_codec(), torch.float32)]
