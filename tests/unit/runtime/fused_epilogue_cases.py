"""The tensors, epilogues and reference of the tests of fused epilogues, in the emulator and on a device."""

from __future__ import annotations

import torch

from bench.common.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.kernels import counter_rng, ops
from dtcomm.kernels.epilogue import empty_quantized, epilogue_task
from dtcomm.runtime.types import Buffers, OpHooks, OpSpec, TensorSpec

ROWS, FEATURES = 17, 150
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class RankTensors:
    """The tensors of every rank: equal for equal arguments."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(ranks)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.bias, self.weight = random(FEATURES), random(FEATURES)
        self.sums = [random(ROWS, FEATURES) for _ in range(ranks)]
        self.residuals = [random(ROWS, FEATURES) for _ in range(ranks)]
        self.normed = [torch.zeros(ROWS, FEATURES, dtype=dtype) for _ in range(ranks)]
        self.quantized = [empty_quantized(self.bias.expand(ROWS, -1)) for _ in range(ranks)]

    def task(self, rank: int, parts: tuple[str, ...] = ("bias", "addend", "norm")) -> OpHooks:
        step = epilogue_task(
            self.sums[rank],
            bias=self.bias if "bias" in parts else None,
            addend=self.residuals[rank] if "addend" in parts else None,
            weight=self.weight if "norm" in parts else None,
            norm_out=self.normed[rank] if "norm" in parts else None,
            quantized=self.quantized[rank] if "norm" in parts else None,
            eps=1e-5,
        )
        return OpHooks(after=(step,))


def run_by_engine(
    tensors: RankTensors, algorithm: str, spec: str, parts: tuple[str, ...] = ("bias", "addend", "norm")
) -> None:
    """Run one call in place."""
    ranks = len(tensors.sums)
    part = TensorSpec(ROWS * FEATURES, tensors.bias.dtype, codec(spec))
    shape = OpSpec("all_reduce", "avg", (part,), algorithm)
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    operations = [
        [Operation(shape=shape, schedule=schedule, buffers=[Buffers(x, x)], hooks=tensors.task(rank, parts))]
        for rank, x in enumerate(tensors.sums)
    ]
    assert {outcome.status for outcome in run_simulated(Simulation(ranks=ranks, seed=1), operations)} == {
        "done"
    }


def symmetric_sum(terms: list[torch.Tensor], spec: str) -> torch.Tensor:
    """Return what `TWO_SHOT_SYMMETRIC` gives every rank: owners encode every term, their own too, and then the sum."""
    ranks, numel, shape_codec = len(terms), terms[0].numel(), codec(spec)
    granules = -(-numel // shape_codec.granularity)
    total = torch.empty_like(terms[0]).view(-1)
    for owner in range(ranks):
        start, stop = (
            min(numel, granules * r // ranks * shape_codec.granularity) for r in (owner, owner + 1)
        )
        payloads = [
            ops.encode(spec, term.view(-1)[start:stop], key=counter_rng.mix_key(0, rank, owner), offset=start)
            for rank, term in enumerate(terms)
        ]
        ops.reduce_encode(
            spec,
            payloads,
            stop - start,
            dtype=total.dtype,
            key=counter_rng.mix_key(0, owner, ranks),
            offset=start,
            decoded=total[start:stop],
        )
    return total.view(terms[0].shape)


def same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for left, right in zip(tensors, others, strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
