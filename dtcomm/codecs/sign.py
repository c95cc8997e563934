"""One bit per element: the sign, and the mean magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import BLOCKS, SCALE_BYTES, SCALES, Codec, Layout, block_layout, option, pack


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
    2021. Reference: dtcomm.kernels.reference.sign.
    """

    family: ClassVar[int] = 6
    reference: ClassVar[str] = "sign"
    block: int = option(default=256, valid=BLOCKS)
    scale: str = option(default="bf16", choices=("bf16", "fp32"))
    rotate: str = option(default="none", choices=("none", "hadamard"))

    def __post_init__(self) -> None:
        self._check_block()

    @property
    def name(self) -> str:
        return "sign"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return block_layout(self.block, SCALE_BYTES[self.scale], 1)

    def native(self) -> bytes:
        rotate = self.rotate == "hadamard"
        return pack(self.family, scale=SCALES[self.scale], rotate=rotate, block=self.block)
