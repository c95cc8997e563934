"""Calls of every collective, for tests that compare two runtimes."""

import torch

import dtcomm.collectives as C
from dtcomm import algorithms

OVER_GLOO = {"DTCOMM_RUNTIME": "process_group", "DTCOMM_PIECE_KIB": "16"}


def calls(
    rank: int,
    world_size: int,
    timed: bool = True,
    specs: tuple[str, ...] = ("none", "fp16", "int8", "int8:round=stochastic"),
    sizes: tuple[int, ...] = (1, 5000, 200_001),
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Call every collective and return the results, which must be equal bit for bit in every runtime.

    With ``timed`` the handles of asynchronous calls must have their times.
    """
    results = []
    generator = torch.Generator().manual_seed(rank)

    def normal(numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=generator).to(device)

    for spec in specs:
        for numel in sizes:
            for name in algorithms.available("all_reduce"):
                x = normal(numel)
                residual = normal(numel)
                C.all_reduce(x, "avg", codec=spec, algorithm=name, residual=residual)
                results += [x, residual]
            x = normal(numel)
            C.broadcast(x, src=world_size - 1, codec=spec)
            gathered, scattered = torch.empty(numel * world_size).to(device), torch.empty(numel).to(device)
            C.all_gather(gathered, normal(numel), codec=spec, algorithm="tree")
            C.reduce_scatter(scattered, normal(numel * world_size), codec=spec, algorithm="ring")
            results += [x, gathered, scattered]
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        x = (normal(3000) * 9).abs().to(dtype)
        C.all_reduce(x, "max")
        results.append(x)
    tensors = [normal(numel) for numel in (10, 0, 50_000, 333)]
    works = [C.all_reduce_coalesced(tensors, codec=["none", "none", "int8", "fp16"], async_op=True)]
    y = normal(70_000)
    works.append(C.all_reduce(y, codec="int8", async_op=True))
    assert all(work is not None for work in works)
    assert works[1].get_future().wait()[0].data_ptr() == y.data_ptr()
    for work in works:
        work.wait()
        if device != "cpu":
            torch.cuda.synchronize()
        assert work.is_completed() and work.wire_bytes > 0 and (work.seconds is not None) == timed
    return [tensor.cpu() for tensor in (*results, *tensors, y)]
