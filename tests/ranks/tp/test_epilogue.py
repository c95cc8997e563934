"""Epilogues inside the engine: applied piece by piece in any order, they equal one pass at the end."""

from __future__ import annotations

import itertools

import pytest
import torch

import dtcomm
from bench.common.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.kernels import available, ops, use
from dtcomm.kernels.epilogue import empty_quantized, epilogue, epilogue_task
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec, TensorSpec

ROWS, FEATURES = 37, 150  # pieces and shards end inside rows


def all_reduce_with_epilogue(
    ranks: int,
    spec: str,
    algorithm: str,
    dtype: torch.dtype,
    *,
    parts: tuple[str, ...],
    shared: bool,
    seed: int,
) -> list[tuple[torch.Tensor, ...]]:
    """Return every rank's result, its norm, and values and scales of the norm in fp8 or int8."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    bias, weight, residual = random(FEATURES), random(FEATURES), random(ROWS, FEATURES)
    shape = OpSpec("all_reduce", "sum", (TensorSpec(ROWS * FEATURES, dtype, codec(spec)),), algorithm)
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    tensors = [random(ROWS, FEATURES) for _ in range(ranks)]
    norms = [torch.zeros(ROWS, FEATURES, dtype=dtype) for _ in range(ranks)]
    types = [(torch.float8_e4m3fn, torch.int8)[rank % 2] for rank in range(ranks)]
    quantized = [empty_quantized(norms[0], values, group=50) for values in types]
    arguments = {"bias": bias, "addend": residual, "weight": weight, "eps": 1e-5}
    selected = {name: arguments[name] for name in parts}
    operations = []
    for tensor, normed, in_8_bits in zip(tensors, norms, quantized, strict=True):
        outputs = {"norm_out": normed, "quantized": in_8_bits} if "weight" in parts else {}
        step = epilogue_task(tensor, **selected, **outputs)
        hooks = NO_HOOKS if not parts else OpHooks(after=(step,))
        buffers = [Buffers(tensor, tensor, None)]
        operations.append(
            [Operation(shape=shape, schedule=schedule, buffers=buffers, shared=shared, hooks=hooks)]
        )
    outcomes = run_simulated(Simulation(ranks=ranks, seed=seed, delay=0.3), operations)
    assert {outcome.status for outcome in outcomes} == {"done"}
    if not parts:
        for tensor, normed, in_8_bits in zip(tensors, norms, quantized, strict=True):
            runs = [(ops.encode("none", tensor), tensor.numel())]
            epilogue("none", runs, tensor, norm_out=normed, quantized=in_8_bits, **arguments)
    return [
        (tensor, normed, in_8_bits.values.view(torch.uint8), in_8_bits.scales)
        for tensor, normed, in_8_bits in zip(tensors, norms, quantized, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
def test_an_epilogue_applied_in_pieces_equals_one_pass(algorithm: str, dtype: torch.dtype) -> None:
    all_parts = ("bias", "addend", "weight", "eps")
    for spec, shared in (("int8", False), ("int4:block=64", False), ("none", False), ("none", True)):
        options = {"shared": shared, "seed": 3}
        expected = all_reduce_with_epilogue(3, spec, algorithm, dtype, parts=(), **options)
        actual = all_reduce_with_epilogue(3, spec, algorithm, dtype, parts=all_parts, **options)
        for x, y in zip(itertools.chain(*actual), itertools.chain(*expected), strict=True):
            assert torch.equal(x, y), (spec, shared)


def test_single_operations_on_every_kernel() -> None:
    operands = {"bias": torch.randn(33), "addend": torch.randn(5, 33), "weight": torch.randn(33)}
    total = torch.randn(5, 33)
    for name, tensor in operands.items():
        results = []
        for kernel in (None, *available()):
            out, normed = total.clone(), torch.zeros(5, 33)
            arguments = {name: tensor} | ({"norm_out": normed} if name == "weight" else {})
            if kernel is None:
                epilogue("none", [(ops.encode("none", total), 165)], out, **arguments)
            else:
                with use(kernel):
                    epilogue_task(out, **arguments)()
            results.append(torch.cat([out, normed]))
        assert all(torch.equal(result, results[0]) for result in results), name


def check_among_ranks(rank: int, ranks: int) -> None:
    """Run several sums at once; codecs whose sums take several stages apply the epilogue at the end."""
    for spec in ("int8", "none", "exact"):
        streams = [torch.full((64, 96), float(index)) for index in range(6)]
        tensors = [torch.full((64, 96), float(rank + index)) for index in range(6)]
        sums = [tensor.clone() for tensor in tensors]
        works = [
            dtcomm.all_reduce(
                tensor, codec=spec, async_op=True, epilogue=epilogue_task(tensor, addend=stream)
            )
            for tensor, stream in zip(tensors, streams, strict=True)
        ]
        for work, tensor, total, stream in zip(works, tensors, sums, streams, strict=True):
            work.wait()
            dtcomm.all_reduce(total, codec=spec)
            assert torch.equal(tensor, total + stream)
            dtcomm.all_reduce(total, codec=spec, epilogue=epilogue_task(total, addend=stream))


def test_concurrent_sums_apply_their_own_epilogues() -> None:
    run_ranks(check_among_ranks, 2)
    run_ranks(check_among_ranks, 1)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="bias: expected 8 elements, got 7"):
        epilogue_task(torch.zeros(3, 8), bias=torch.zeros(7))
    with pytest.raises(TypeError, match="addend"):
        epilogue_task(torch.zeros(3, 8), addend=torch.zeros(3, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="weight: needs norm_out"):
        epilogue_task(torch.zeros(3, 8), weight=torch.zeros(8))
