"""What the tests on a device share: tensors on it, two ranks on one, a model that is the same on every device."""

from __future__ import annotations

import pytest
import torch

from dtcomm.runtime.types import Buffers

ON_A_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]
PEER = {"DTCOMM_RUNTIME": "peer", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def on_device(each: Buffers) -> Buffers:
    given, out, residual = each
    there = given.cuda()
    return Buffers(
        there, there if out is given else out.cuda(), None if residual is None else residual.cuda()
    )


def on_cpu(each: Buffers) -> Buffers:
    return Buffers(*(None if tensor is None else tensor.cpu() for tensor in each))


class Given(torch.nn.Module):
    """A model whose gradients are what it is given: the same numbers on every device."""

    def __init__(self, rank: int, device: str) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(rank)
        shapes = [(64, 33), (128,), (96, 96)]
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(each, device=device)) for each in shapes]
        )
        self.gradients = [torch.randn(each, generator=dice).to(device) for each in shapes]

    def forward(self) -> torch.Tensor:
        pairs = zip(self.weights, self.gradients)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()
