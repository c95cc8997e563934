"""Measures what an encoding loses of a gradient, on a sample of its elements.

The DDP hook, `LocalSGD` and FSDP take samples on every ``sample_every``-th step; the guard and the reports read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtcomm.compress.spec import Scheme

MAX_SAMPLES = 8192  # elements of a gradient, or of a mean, that are looked at
TYPICAL_SHARE = 0.9  # the share of elements, the smallest ones, over which the typical error is taken


@dataclass
class ErrorSample:
    """A sample of one parameter before its encoding, to be compared with what the encoding lost.

    Attributes:
        name: The parameter.
        scheme: What it is compressed with.
        stride: Every ``stride``-th element is in the sample.
        encoder_input: The sampled elements of gradient + residual, fp32.
        gradient_norm: The norm of the whole gradient; a tensor without dimensions on the gradient's device.
    """

    name: str
    scheme: Scheme
    stride: int
    encoder_input: torch.Tensor
    gradient_norm: float | torch.Tensor

    @staticmethod
    def take(
        name: str,
        scheme: Scheme,
        gradient_norm: float | torch.Tensor,
        sent: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> ErrorSample:
        """Copy every n-th element of ``sent`` + ``residual``, the two tensors that are given to the collective."""
        stride = max(1, sent.numel() // MAX_SAMPLES)
        encoder_input = sent[::stride].float()
        if residual is not None:
            encoder_input = encoder_input + residual[::stride]
        return ErrorSample(name, scheme, stride, encoder_input, gradient_norm)

    def measure(self, lost: torch.Tensor) -> torch.Tensor:
        """Return fp32 [3] on the device of ``lost``; the host does not wait for it.

        The values are the share of the typical elements that is missing (1 less their projection on what arrived),
        |lost| / |gradient|, and |gradient| squared. The first two are 0 if they are not finite.
        """
        magnitudes = self.encoder_input.abs()
        if not magnitudes.numel():
            return torch.zeros(3, device=lost.device)
        # A place in the sorted magnitudes instead of a quantile, whose number would have to be read on the host.
        largest_typical = magnitudes.sort().values[int(TYPICAL_SHARE * (magnitudes.numel() - 1))]
        is_typical = magnitudes <= largest_typical
        typical = torch.where(is_typical, self.encoder_input, 0.0)
        missing = (
            typical * torch.where(is_typical, lost[:: self.stride], 0.0)
        ).sum() / typical.square().sum()
        missing = torch.where(torch.isfinite(self.encoder_input).all(), missing, 0.0)
        gradient_norm = torch.as_tensor(self.gradient_norm, dtype=torch.float32).reshape(1)
        residual_ratio = torch.linalg.vector_norm(lost) / gradient_norm
        errors = torch.stack([missing.clamp(min=0.0), residual_ratio.reshape(())])
        return torch.cat([torch.where(torch.isfinite(errors), errors, 0.0), gradient_norm.square()])


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm in fp32, a tensor without dimensions on the device of ``tensor``."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm
