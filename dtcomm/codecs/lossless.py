"""The lossless codec, whose payloads have a length that depends on the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from dtcomm.codecs.base import Codec, Layout, count

HEAD_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Lossless(Codec):
    """``lossless``: bf16 and fp32 with every bit kept, in fewer bytes where exponents are alike, as in weights.

    The exponents of each 4096 elements become codes of 1 to 4 bits, which stand for neighbouring exponents; the others
    are stored apart. Signs and mantissas do not shrink. A Gaussian tensor takes 11.2 bits an element in bf16 (30 %
    less) and 27.2 bits in fp32 (15 % less). A tensor that would not shrink travels as it is, with a head of 16 bytes.

    The length of a payload depends on the data, and ``wire_bytes`` is its upper bound. So the codec serves what copies
    whole payloads: `dtcomm.encode` and `dtcomm.decode`, for checkpoints, and broadcast, all_gather, gather, scatter,
    all_to_all, send and recv, which exchange the lengths first. Reductions refuse it: they add payloads piece by piece
    in memory of a fixed size. FSDP's parameters may travel in it. It has no kernels for CUDA tensors.

    Published work on the same idea: DFloat11 (Zhang et al., "70% Size, 100% Accuracy", arXiv:2504.11651, 2025), with
    Huffman codes; codes of a fixed width decode faster. Reference: dtcomm.kernels.reference.lossless.
    """

    reference: ClassVar[str] = "lossless"
    has_cuda_kernel: ClassVar[bool] = False
    variable_length: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "lossless"

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
        return HEAD_BYTES + numel * dtype.itemsize if count(numel) else 0

    def _refuse_layout(self) -> NoReturn:
        raise TypeError("codec 'lossless' has no layout: the length of its payloads depends on the data")
