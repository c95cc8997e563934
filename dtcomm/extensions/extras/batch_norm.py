"""Batch normalization over the batches of all ranks, also on the CPU, where torch's SyncBatchNorm does not run.

The statistics of Ioffe and Szegedy 2015 (arXiv:1502.03167) are those of all ranks' samples together. Each rank sends
its count, means and sums of squared deviations, and merges those of all ranks in rank order (Chan, Golub and LeVeque
1983), so all ranks end with the same bits. They travel uncompressed: they are two numbers for each channel, whose
messages take the same time in any codec, and an error in one of them changes a whole channel of every sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtcomm.collectives import all_gather, all_reduce
from dtcomm.torch_compat import BatchNorm, autograd_apply

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """torch's SyncBatchNorm on dtcomm's collectives, for tensors on the CPU and on CUDA devices.

    Batches may have different sizes on the ranks, 0 included. In evaluation mode, and in a job with one rank, it is
    nn.BatchNorm. Gradients of weight and bias are those of this rank's samples; DDP averages them.

    It is no subclass of torch's class, which DDP refuses on the CPU. On CUDA devices torch's own works with the backend
    "dtcomm" too. Every rank takes part in every forward and backward pass, so it does not work in DDP's ``join``.

    Args:
        num_features: Number of channels, the size of dimension 1 of the input.
        eps: Added to the variance. Default: 1e-5.
        momentum: Share of a batch in the running statistics; None: their mean over all batches. Default: 0.1.
        affine: Add weight and bias. Default: True.
        track_running_stats: Keep running statistics. Default: True.
        process_group: The ranks whose batches belong together; None: all. Default: None.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Raises:
        ValueError: When it runs: the input has fewer than two dimensions, or all ranks together have one value for each
            channel.

    Example::

        model = dtcomm.extensions.extras.SyncBatchNorm.convert_sync_batchnorm(model)
        model = torch.nn.parallel.DistributedDataParallel(model)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Replace the BatchNorm layers of a model, torch's SyncBatchNorm included, in place.

        Args:
            module: The model; a layer of its own is returned converted.
            process_group: The ranks whose batches belong together; None: all. Default: None.

        Returns:
            The model. Parameters and buffers are the same objects as before.
        """
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            options = (module.eps, module.momentum, module.affine, module.track_running_stats, process_group)
            layer = cls(module.num_features, *options, device="meta")
            for name in ("weight", "bias"):
                layer._parameters[name] = module._parameters[name]
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                layer._buffers[name] = module._buffers[name]
            layer.training = module.training
            return layer
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child, process_group)
            if converted is not child:
                setattr(module, name, converted)
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input: expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input.

        Args:
            input: [batch, channels, ...]; fp32, fp16, bf16 or fp64.

        Returns:
            A tensor of the same shape and dtype.
        """
        self._check_input_dim(input)
        synchronize = self.training and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        if not synchronize:
            return super().forward(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        y, mean, variance, count = autograd_apply(
            _Normalize, input, self.weight, self.bias, self.eps, self.process_group
        )
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        result: torch.Tensor = y
        return result


class _Normalize(torch.autograd.Function):
    """The normalization and its gradient, with statistics of all ranks; arithmetic is in fp32, or fp64 for fp64."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Any:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        channels, dims = x.shape[1], [dim for dim in range(x.ndim) if dim != 1]
        own = wide.new_zeros(2 * channels + 1)
        if x.numel():
            count = x.numel() // channels
            mean = wide.mean(dims)
            own[:channels] = mean
            own[channels:-1] = (wide - _per_channel(mean, x.ndim)).square().sum(dims)
            own[-1] = count
        gathered = torch.empty((dist.get_world_size(group), len(own)), dtype=own.dtype, device=own.device)
        all_gather(gathered, own, group=group)
        means, squares, counts = torch.split(gathered, [channels, channels, 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        if not torch.compiler.is_compiling() and x.is_cpu and float(total) < 2:
            raise ValueError(
                f"input: expected more than 1 value for each channel in training, all ranks have {int(total)}"
            )
        invstd = torch.rsqrt(variance + eps)
        unit = (wide - _per_channel(mean, x.ndim)) * _per_channel(invstd, x.ndim)
        y = unit
        if weight is not None:
            y = y * _per_channel(weight.to(y.dtype), x.ndim)
        if bias is not None:
            y = y + _per_channel(bias.to(y.dtype), x.ndim)
        ctx.save_for_backward(x, weight, mean, invstd, total)
        ctx.dims, ctx.group = dims, group
        ctx.mark_non_differentiable(mean, variance, total)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *unused: Any) -> Any:
        x, weight, mean, invstd, total = ctx.saved_tensors
        wide, wide_dy = x.to(mean.dtype), dy.to(mean.dtype)
        unit = (wide - _per_channel(mean, x.ndim)) * _per_channel(invstd, x.ndim)
        sum_dy, sum_dy_unit = wide_dy.sum(ctx.dims), (wide_dy * unit).sum(ctx.dims)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_unit])
            all_reduce(sums, group=ctx.group)
            mean_dy, mean_dy_unit = (sums / total).chunk(2)
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            centred = wide_dy - _per_channel(mean_dy, x.ndim) - unit * _per_channel(mean_dy_unit, x.ndim)
            dx = (centred * _per_channel(scale, x.ndim)).to(x.dtype)
        dweight = sum_dy_unit.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        dbias = sum_dy.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


def _per_channel(values: torch.Tensor, ndim: int) -> torch.Tensor:
    return values.view(1, -1, *[1] * (ndim - 2))
