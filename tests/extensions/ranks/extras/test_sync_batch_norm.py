"""SyncBatchNorm: the statistics, outputs and gradients of the whole batch, in parts of any size on 2 and 3 ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.parallel import DistributedDataParallel

from dtcomm.extensions.extras.batch_norm import SyncBatchNorm
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

SIZES = {2: (3, 5), 3: (4, 0, 2)}


def whole_batch(ranks: int, *shape: int) -> list[torch.Tensor]:
    """Return the parts of a batch, of unequal sizes, far from zero mean."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(sum(SIZES[ranks]), *shape, generator=generator) * 2 + 5
    return list(batch.split(SIZES[ranks]))


def compare_with_whole_batch(rank: int, ranks: int) -> None:
    for shape in ((4, 3, 3), (4, 6), (4,)):
        for momentum, affine in ((0.1, True), (None, True), (0.3, False)):
            parts = whole_batch(ranks, *shape)
            dense = nn.BatchNorm2d(4, momentum=momentum, affine=affine)
            dense._check_input_dim = lambda input: None  # type: ignore[method-assign]
            if affine:
                nn.init.uniform_(dense.weight)
            layer = SyncBatchNorm.convert_sync_batchnorm(dense_copy(dense))
            assert isinstance(layer, SyncBatchNorm)
            whole = torch.cat(parts).requires_grad_()
            own = parts[rank].clone().requires_grad_()
            expected, actual = dense(whole), layer(own)
            expected.pow(3).sum().backward()
            actual.pow(3).sum().backward()
            begin = sum(SIZES[ranks][:rank])
            torch.testing.assert_close(actual, expected[begin : begin + len(own)])
            torch.testing.assert_close(own.grad, whole.grad[begin : begin + len(own)], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.running_mean, dense.running_mean)
            torch.testing.assert_close(layer.running_var, dense.running_var)
            assert int(layer.num_batches_tracked) == 1
            if affine:
                for name in ("weight", "bias"):
                    gradient = getattr(layer, name).grad.clone()
                    dist.all_reduce(gradient)
                    torch.testing.assert_close(gradient, getattr(dense, name).grad, rtol=1e-4, atol=1e-4)
            # The same bits on all ranks.
            running = [torch.empty_like(layer.running_var) for _ in range(ranks)]
            dist.all_gather(running, layer.running_var)
            assert all(torch.equal(other, layer.running_var) for other in running)
            layer.eval(), dense.eval()
            assert torch.equal(layer(parts[0]), type(dense).forward(layer, parts[0]))


def dense_copy(dense: nn.BatchNorm2d) -> nn.BatchNorm2d:
    copy = nn.BatchNorm2d(4, momentum=dense.momentum, affine=dense.affine)
    copy.load_state_dict({name: tensor.clone() for name, tensor in dense.state_dict().items()})
    return copy


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "dtcomm")])
def test_it_is_batch_norm_of_the_whole_batch(ranks: int, backend: str) -> None:
    run_ranks(compare_with_whole_batch, ranks, backend=backend)


def convolutional_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))


@on_ranks(2)
def test_a_model_in_ddp_learns_what_the_dense_one_does(rank: int, ranks: int) -> None:
    """A converted model in DDP learns what the dense model learns from the whole batch."""
    torch.manual_seed(0)
    dense = convolutional_model()
    converted = convolutional_model()
    converted.load_state_dict(dense.state_dict())
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(converted))
    batch = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (dense, model)]
    for _ in range(3):
        dense(batch).mean().backward()
        model(batch.chunk(ranks)[rank]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in converted.state_dict().items():
        torch.testing.assert_close(tensor, dense.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
    with pytest.raises(ValueError, match="all ranks have 1"):
        SyncBatchNorm(4)(torch.ones(1 - rank, 4))
    with pytest.raises(ValueError, match="input: expected at least 2 dimensions, got 1"):
        SyncBatchNorm(4)(torch.ones(4))


def torch_function(rank: int, ranks: int) -> list[torch.Tensor]:
    """Run the function of torch's SyncBatchNorm, which exchanges statistics, with formulas for its CUDA kernels."""

    def stats(x: torch.Tensor, eps: float) -> Any:
        return x.mean((0, 2)), (x.var((0, 2), unbiased=False) + eps).rsqrt()

    def gather_stats(
        x: Any, means: Any, invstds: Any, mean: Any, var: Any, momentum: Any, eps: Any, n: Any
    ) -> Any:
        n = n.unsqueeze(1)
        total = (means * n).sum(0) / n.sum()
        variance = ((invstds.pow(-2) - eps + means.square()) * n).sum(0) / n.sum() - total.square()
        return total, (variance + eps).rsqrt()

    def shape(values: torch.Tensor) -> torch.Tensor:
        return values.view(1, -1, 1)

    kernels: dict[str, Any] = {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": lambda x, w, b, mean, invstd, eps: (
            (x - shape(mean)) * shape(invstd * w) + shape(b)
        ),
        "batch_norm_backward_reduce": lambda dy, x, mean, invstd, w, *needs: (
            dy.sum((0, 2)),
            (dy * (x - shape(mean))).sum((0, 2)),
            (dy * (x - shape(mean)) * shape(invstd)).sum((0, 2)),
            dy.sum((0, 2)),
        ),
        "batch_norm_backward_elemt": lambda dy, x, mean, invstd, w, sum_dy, sum_dy_xmu, n: (
            (dy - shape(sum_dy) / n.sum() - (x - shape(mean)) * shape(invstd.square() * sum_dy_xmu) / n.sum())
            * shape(invstd * w)
        ),
    }
    x = whole_batch(ranks, 4, 6)[rank].requires_grad_()
    weight, bias = torch.linspace(1, 2, 4).requires_grad_(), torch.zeros(4, requires_grad=True)
    with mock.patch.multiple(torch, **kernels):
        y = TorchFunction.apply(x, weight, bias, None, None, 1e-5, 0.1, dist.group.WORLD, ranks)
        y.pow(3).sum().backward()
    layer = SyncBatchNorm(4)
    own = x.detach().clone().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(weight)
    mine = layer(own)
    mine.pow(3).sum().backward()
    torch.testing.assert_close(mine, y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.grad, x.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-3, atol=1e-3)
    return [tensor.detach() for tensor in (y, x.grad, weight.grad, bias.grad)]


def test_torchs_function_gives_the_same_bits_on_gloo_and_dtcomm() -> None:
    gloo, own = (run_ranks(torch_function, 2, backend=backend) for backend in ("gloo", "dtcomm"))
    for expected, actual in zip(gloo, own, strict=True):
        for one, other in zip(expected, actual, strict=True):
            assert torch.equal(one, other)
