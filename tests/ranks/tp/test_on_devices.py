"""Tensor parallelism over the runtimes of CUDA tensors (NCCL's and Gloo's), on CPU tensors: the engine's bits."""

from __future__ import annotations

import torch

import dtcomm.collectives as C
from dtcomm import tp
from dtcomm.kernels.epilogue import epilogue_task
from dtcomm.launch.ranks import run_ranks
from tests.ranks.runtime.test_on_streams import communicator_of_fake_device

FEATURES = 96


def results(rank: int, ranks: int) -> list[torch.Tensor]:
    """Return sums with epilogues, and layers' outputs and gradients."""
    generator = torch.Generator().manual_seed(11)
    tensors = []
    for dtype in (torch.float32, torch.bfloat16):
        bias, weight = (torch.randn(FEATURES, generator=generator).to(dtype) for _ in "ab")
        terms = [torch.randn(40, FEATURES, generator=generator).to(dtype) for _ in range(ranks)]
        for async_op in (False, True):
            y, normed, stream = terms[rank].clone(), torch.empty(40, FEATURES, dtype=dtype), terms[0] * 2
            epilogue = epilogue_task(y, bias=bias, addend=stream, weight=weight, norm_out=normed)
            work = C.all_reduce(y, codec="int8", algorithm="two_shot", async_op=async_op, epilogue=epilogue)
            if work is not None:
                work.wait()
            tensors += [y, normed]
        for algorithm in ("auto", "two_shot_symmetric"):
            layer = tp.RowParallelLinear(
                64, FEATURES, codec="int8", algorithm=algorithm, latency=False, chunks=2, dtype=dtype
            )
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter_generator = torch.Generator().manual_seed(rank)
                    parameter.copy_(torch.randn(parameter.shape, generator=parameter_generator))
            x = torch.randn(3, 20, 64 // ranks, generator=generator).to(dtype).requires_grad_()
            stream = torch.randn(3, 20, FEATURES, generator=generator).to(dtype)
            y, normed = layer.with_norm(x, stream, weight)
            (y.sum() + normed.sum()).backward()
            tensors += [y.detach(), normed.detach(), x.grad, layer.bias.grad]
    return tensors


def compare_runtimes(rank: int, ranks: int) -> dict[str, list[int]]:
    expected = results(rank, ranks)
    C.release()
    different = {}
    for backend in ("nccl", "gloo"):
        communicator_of_fake_device(backend)
        actual = results(rank, ranks)
        different[backend] = [i for i, (a, b) in enumerate(zip(expected, actual)) if not torch.equal(a, b)]
        C.release()
    return different | {"results": [len(expected)]}


def test_same_bits_as_the_engine() -> None:
    for differences in run_ranks(compare_runtimes, 2):
        assert differences == {"nccl": [], "gloo": [], "results": [24]}
