"""Helpers of the tests that need a GPU: tensors on it, two ranks on one GPU, a model that is equal on every device."""

from __future__ import annotations

import pytest
import torch

from dtcomm.runtime.types import Buffers

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]
PEER_RUNTIME = {"DTCOMM_RUNTIME": "peer", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def on_device(buffers: Buffers) -> Buffers:
    """Copy the tensors to the GPU; an output that aliases the input aliases its copy."""
    source, out, residual = buffers
    copy = source.cuda()
    return Buffers(copy, copy if out is source else out.cuda(), None if residual is None else residual.cuda())


def on_cpu(buffers: Buffers) -> Buffers:
    return Buffers(*(None if tensor is None else tensor.cpu() for tensor in buffers))


class FixedGradientModel(torch.nn.Module):
    """A model whose gradients are fixed, so that they are the same numbers on every device.

    It takes an argument for FSDP2, which looks for one where it moves the inputs of a root module to a GPU.
    """

    def __init__(self, rank: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        shapes = [(64, 33), (128,), (96, 96)]
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        )
        self.gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]

    def forward(self, factor: torch.Tensor | None = None) -> torch.Tensor:
        pairs = zip(self.weights, self.gradients)
        total = torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()
        return total if factor is None else total * factor
