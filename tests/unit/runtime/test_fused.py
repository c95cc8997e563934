"""The launcher of the fused kernels, with virtual ranks in the emulator: the engine's bytes, absent ranks."""

import pytest
import torch

from bench.common.virtual_ranks import Operation, Simulation, VirtualRanks, run_simulated
from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.errors import PeerLost
from dtcomm.runtime.cuda_peer.launch import COLLECTIVES, section_granules, why_not
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from tests.unit.kernels.inputs import floats
from tests.unit.runtime.simulated_cases import SHARDS_IN, SHARDS_OUT

SPECS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:block=128",
    "int4",
    "fp8_e4m3",
)
DIRECT = {
    "all_reduce": ("two_shot", "one_shot"),
    "reduce_scatter": ("one_shot",),
    "all_gather": ("one_shot",),
    "all_to_all": ("one_shot",),
}


def tensors(collective: str, ranks: int, numel: int, dtype: torch.dtype, feedback: bool) -> list[Buffers]:
    """Return the buffers of every rank; equal arguments give equal values."""
    buffers = []
    for rank in range(ranks):
        source = floats("normal", numel * (ranks if collective in SHARDS_IN else 1), seed=rank).to(dtype)
        out = source
        if collective != "all_reduce":
            out = torch.full((numel * (ranks if collective in SHARDS_OUT else 1),), 7.0, dtype=dtype)
        residual = floats("normal", source.numel(), seed=50 + rank) * 0.1 if feedback else None
        buffers.append(Buffers(source, out, residual))
    return buffers


def run_by_engine(shape: OpSpec, ranks: int, buffers: list[Buffers]) -> None:
    schedule = algorithms.build(shape.algorithm, shape.collective, ranks)
    operations = [[Operation(shape=shape, schedule=schedule, buffers=[buffer])] for buffer in buffers]
    assert {buffer.status for buffer in run_simulated(Simulation(ranks=ranks, seed=1), operations)} == {
        "done"
    }


def same(buffers: list[Buffers], others: list[Buffers]) -> None:
    for left, right in zip(buffers, others, strict=True):
        for a, b in zip(left, right, strict=True):
            if a is not None and b is not None:
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("collective", list(COLLECTIVES))
def test_virtual_ranks_match_engine_bytes(collective: str, ranks: int) -> None:
    virtual = VirtualRanks(ranks, slot_bytes=4096)
    turn = 0
    for algorithm in DIRECT[collective]:
        for spec in SPECS:
            # Sizes, types and options alternate, so that not every combination runs.
            turn += 1
            numel, dtype = (5000, 1, 2048)[turn % 3], (torch.float32, torch.bfloat16)[turn % 2]
            op = ("sum", "avg")[turn % 2] if collective in ("all_reduce", "reduce_scatter") else "sum"
            shape = OpSpec(collective, op, (TensorSpec(numel, dtype, codec(spec)),), algorithm)
            fused = tensors(collective, ranks, numel, dtype, turn % 3 == 0)
            reference = tensors(collective, ranks, numel, dtype, turn % 3 == 0)
            virtual.fused.launch(virtual.fused.prepare(shape), [[buffer] for buffer in fused])
            run_by_engine(shape, ranks, reference)
            same(fused, reference)
    virtual.check()


def test_messages_of_several_tensors() -> None:
    parts = tuple(
        TensorSpec(numel, torch.float32, codec(spec))
        for spec, numel in (("int8", 2000), ("none", 0), ("int4", 1), ("int8", 1500))
    )
    shape = OpSpec("all_reduce", "avg", parts, "two_shot")
    virtual = VirtualRanks(4)
    fused, reference = (
        [tensors("all_reduce", 4, part.numel, torch.float32, part.numel > 0) for part in parts] for _ in "ab"
    )
    virtual.fused.launch(virtual.fused.prepare(shape), list(zip(*fused, strict=True)))
    virtual.check()
    for part, result, expected in zip(parts, fused, reference, strict=True):
        run_by_engine(shape._replace(parts=(part,)), 4, expected)
        same(result, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int64, torch.bool], ids=str)
def test_copying_collectives_accept_any_dtype(dtype: torch.dtype) -> None:
    virtual = VirtualRanks(3)
    for collective in ("all_gather", "all_to_all"):
        shape = OpSpec(collective, "sum", (TensorSpec(1111, dtype, codec("none")),), "one_shot")
        fused, reference = (tensors(collective, 3, 1111, dtype, feedback=False) for _ in "ab")
        virtual.fused.launch(virtual.fused.prepare(shape), [[buffer] for buffer in fused])
        run_by_engine(shape, 3, reference)
        same(fused, reference)
    virtual.check()


def test_all_reduce_of_virtual_ranks() -> None:
    virtual = VirtualRanks(4, seed=7)
    xs, losses = (
        [torch.full((3000,), float(rank)) for rank in range(4)],
        [torch.zeros(3000) for _ in range(4)],
    )
    virtual.all_reduce(xs, "avg", codec="int8", residuals=losses)
    assert all(torch.equal(x, xs[0]) for x in xs) and (xs[0] - 1.5).abs().max() < 0.01
    virtual.all_reduce(xs, "max", algorithm="one_shot")
    assert (xs[3] - 1.5).abs().max() < 0.01


def test_absent_virtual_rank_is_named() -> None:
    virtual = VirtualRanks(3, absent=1)
    virtual.all_reduce([torch.ones(100) for _ in range(3)])
    with pytest.raises(PeerLost, match="rank 1 did not arrive in time"):
        virtual.check()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"collective": "broadcast"}, "two_shot has no fused kernel of broadcast"),
        ({"algorithm": "ring"}, "ring has no fused kernel of all_reduce"),
        ({"collective": "all_gather"}, "two_shot has no fused kernel of all_gather"),
        ({"checksum": True}, "no checksum"),
        ({"parts": (TensorSpec(9, torch.float32, codec("topk:ratio=0.1")),)}, "topk:ratio=0.1"),
        ({"parts": (TensorSpec(9, torch.float32, codec("int8:round=stochastic")),)}, "round=stochastic"),
        ({"parts": (TensorSpec(9, torch.int32, codec("none")),)}, "int32"),
        (
            {"parts": (TensorSpec(9, torch.float32, codec("none"), codec("topk:ratio=0.1")),)},
            "inside one host",
        ),
    ],
)
def test_reason_when_no_fused_kernel_exists(change: dict, reason: str) -> None:
    shape = OpSpec("all_reduce", "sum", (TensorSpec(9, torch.float32, codec("int8")),), "two_shot")
    assert why_not(shape, 2) == ""
    assert reason in why_not(shape._replace(**change), 2)
    with pytest.raises(ValueError):
        VirtualRanks(2).fused.prepare(shape._replace(**change))
    assert "9 ranks" in why_not(shape, 9)


@pytest.mark.parametrize(
    ("granules", "most", "blocks"), [(1, 8, 4), (2048, 30, 33), (2048, 15, 33), (999, 1, 7)]
)
def test_sections_of_all_turns_are_equal(granules: int, most: int, blocks: int) -> None:
    section = section_granules(granules, most, blocks)
    turns = -(-granules // (most * blocks))  # with sections as large as slots
    assert 1 <= section <= most
    assert (section - 1) * blocks * turns < granules <= section * blocks * turns


def test_virtual_ranks_refuse_wrong_rank_count_and_device() -> None:
    for wrong, message in (
        ((1, "cpu"), "ranks: expected 2 to 8, got 1"),
        ((2, "meta"), "device: expected cpu or cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            VirtualRanks(*wrong)
    assert _C.MAX_RANKS == 8
