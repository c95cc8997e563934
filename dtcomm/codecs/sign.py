"""One bit per element: the sign, and the mean magnitude of each block.

The codec of EF-signSGD (Karimireddy, Rebjock, Stich and Jaggi, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019) with a scale per block instead of one per tensor. It is meant for error feedback:
without a residual the decoded gradient is biased, and training need not converge. `block=256`: 2 bytes a block are
6 % of the payload. `scale=bf16` has the range of fp32, so that blocks of 1e-30 and of 1e30 survive. There is no
rounding to choose: a sign is a sign, and one drawn at random would be too noisy to train with. `rotate=hadamard`
makes it DRIVE's codec (Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS 2021), whose squared
error is 1 - 2/pi of the data's square, whatever the data: worth its time where they are far from Gaussian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dtcomm.codecs.base import BLOCKS, SCALE_BYTES, SCALES, Codec, Layout, block_layout, option, pack


@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """Plus or minus the mean magnitude of the block."""

    family: ClassVar[int] = 6
    block: int = option(default=256, valid=BLOCKS)
    scale: str = option(default="bf16", valid="bf16, fp32")
    rotate: str = option(default="none", valid="none, hadamard")

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
