"""What a rank measures of its own gradients and encodings, for the monitors of `dtcomm.compress.guard_monitor`."""

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
        is_gradient: Whether it is a gradient, which the limit of spikes applies to; otherwise it is a parameter.
            Default True.
    """

    name: str
    scheme: Scheme
    stride: int
    encoder_input: torch.Tensor
    gradient_norm: float | torch.Tensor
    is_gradient: bool = True

    @staticmethod
    def take(
        name: str,
        scheme: Scheme,
        gradient_norm: float | torch.Tensor,
        sent: torch.Tensor,
        residual: torch.Tensor | None,
        is_gradient: bool = True,
    ) -> ErrorSample:
        """Copy every n-th element of ``sent`` + ``residual``, the two tensors that are given to the collective."""
        stride = max(1, sent.numel() // MAX_SAMPLES)
        # A copy in any case: collectives may write their result over their input.
        encoder_input = sent[::stride].to(torch.float32, copy=True)
        if residual is not None:
            encoder_input += residual[::stride]
        return ErrorSample(name, scheme, stride, encoder_input, gradient_norm, is_gradient)

    def measure(self, lost: torch.Tensor) -> torch.Tensor:
        """Return fp32 [3] on the device of ``lost``; the host does not wait for it.

        The values are the share of the typical elements that is missing (1 less their projection on what arrived),
        |lost| / |gradient|, and |gradient| squared, or 0 for a parameter. The first two are 0 if they are not finite.
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
        square = gradient_norm.square() if self.is_gradient else torch.zeros_like(gradient_norm)
        return torch.cat([torch.where(torch.isfinite(errors), errors, 0.0), square])


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm in fp32, a tensor without dimensions on the device of ``tensor``."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm


@dataclass(frozen=True)
class GradientMeasurement:
    """What was measured of a bucket's gradients on this rank before they were compressed.

    Attributes:
        sketch: The sketch of its lossy segments; None if there are none.
        nonfinite: Whether the gradients hold NaN or Inf, a bool tensor without dimensions. Looked at only if means of
            the steps before were not finite.
    """

    sketch: torch.Tensor | None
    nonfinite: torch.Tensor


def is_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether a sample of a flat tensor holds NaN or Inf, a bool tensor without dimensions."""
    # Of their sum, because torch.isfinite takes twice as long for elements that are not adjacent.
    return ~torch.isfinite(tensor[:: max(1, tensor.numel() // MAX_SAMPLES)].sum(dtype=torch.float32))
