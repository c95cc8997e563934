"""What an encoding loses of a gradient, measured on some of its elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dtcomm.compress.spec import Scheme

SAMPLES = 8192  # elements of a gradient or a mean that are looked at
ORDINARY = 0.9  # the share of elements, the smallest ones, that the typical error is taken over


@dataclass
class Sample:
    """Some elements of one parameter before its encoding, to be compared with what was lost of them."""

    name: str
    scheme: Scheme
    stride: int
    offered: torch.Tensor  # gradient + residual
    gradient: float | torch.Tensor  # |gradient|, of all elements; on a device where the gradient is

    @staticmethod
    def take(
        name: str,
        scheme: Scheme,
        gradient: float | torch.Tensor,
        sent: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Sample:
        """`gradient`: its norm; `sent` and `residual`: what is handed to the collective."""
        stride = max(1, sent.numel() // SAMPLES)
        offered = sent[::stride].float()
        if residual is not None:
            offered = offered + residual[::stride]
        return Sample(name, scheme, stride, offered, gradient)

    def measure(self, lost: torch.Tensor) -> tuple[float, float]:
        """The share of the typical elements that is missing, and |lost| / |gradient|; zeros where there is nothing."""
        size, gradient = self.offered.abs(), float(self.gradient)
        if not size.numel():
            return 0.0, 0.0
        ordinary = size <= torch.quantile(size, ORDINARY)
        offered = self.offered[ordinary]
        square = float(offered @ offered)
        typical = max(0.0, float(offered @ lost[:: self.stride][ordinary]) / square) if square > 0 else 0.0
        kept = float(torch.linalg.vector_norm(lost)) / gradient if gradient > 0 else 0.0
        return (typical if math.isfinite(typical) else 0.0, kept if math.isfinite(kept) else 0.0)

    def measure_there(self, lost: torch.Tensor) -> torch.Tensor:
        """The same and |gradient| squared, fp32 [3], on the device, which nobody waits for."""
        size = self.offered.abs()
        if not size.numel():
            return torch.zeros(3, device=lost.device)
        # The largest of them: a place in what is sorted, since a number that chose the place would have to be read.
        most = size.sort().values[int(ORDINARY * (size.numel() - 1))]
        ordinary = size <= most
        offered = torch.where(ordinary, self.offered, 0.0)
        typical = (offered * torch.where(ordinary, lost[:: self.stride], 0.0)).sum() / offered.square().sum()
        gradient = torch.as_tensor(self.gradient).reshape(1)
        kept = torch.linalg.vector_norm(lost) / gradient
        typical = torch.where(torch.isfinite(self.offered).all(), typical, 0.0)
        found = torch.stack([typical.clamp(min=0.0), kept.reshape(())])
        return torch.cat([torch.where(torch.isfinite(found), found, 0.0), gradient.square()])


def norm_of(tensor: torch.Tensor) -> float | torch.Tensor:
    """The norm in fp32: a number, or where the tensor is on a device a tensor there."""
    found = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return float(found) if found.is_cpu else found
