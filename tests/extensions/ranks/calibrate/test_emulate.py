"""The emulation of ranks in one process compared to the engine and to real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.common.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm import algorithms, tp
from dtcomm.cli.demo import train as demo
from dtcomm.codecs import codec
from dtcomm.codecs.spec import CODECS
from dtcomm.extensions.calibrate.emulate import emulate, emulate_all_reduce, restore
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

SPECS = [
    # randk's positions come from keys that count the engine's messages.
    *(name for name in CODECS if not codec(name).needs_agreement and name != "randk"),
    "int4:rotate=hadamard",
    "int2:spikes=1",
    "int4:symmetric=false,block=128",
]
PLAN = {
    "blocks.*.qkv": "column_packed3",
    "blocks.*.projection": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
SHAPE = demo.ModelShape(vocabulary=20, context=16, layers=1, width=64, heads=4)


def engine_sum(partials: list[torch.Tensor], spec: str, algorithm: str) -> torch.Tensor:
    ranks = len(partials)
    shape = OpSpec(
        "all_reduce", "sum", (TensorSpec(partials[0].numel(), partials[0].dtype, codec(spec)),), algorithm
    )
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    tensors = [partial.clone() for partial in partials]
    outcomes = run_simulated(
        Simulation(ranks=ranks, seed=1, delay=0.1),
        [[Operation(shape=shape, schedule=schedule, buffers=[Buffers(t, t, None)])] for t in tensors],
    )
    assert {outcome.status for outcome in outcomes} == {"done"}
    assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
    return tensors[0]


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("spec", SPECS)
def test_sums_equal_the_engines_bit_for_bit(spec: str, algorithm: str) -> None:
    for ranks, numel, dtype in (
        (2, 5000, torch.float32),
        (3, 12 * 1024, torch.bfloat16),
        (4, 700, torch.float32),
    ):
        generator = torch.Generator().manual_seed(numel)
        partials = [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]
        expected = engine_sum(partials, spec, algorithm)
        assert torch.equal(emulate_all_reduce(partials, spec, algorithm), expected), (ranks, numel)


def test_uncompressed_emulation_equals_the_dense_model_and_can_be_undone() -> None:
    torch.manual_seed(0)
    model, dense = demo.GPT(SHAPE), demo.GPT(SHAPE)
    dense.load_state_dict(model.state_dict())
    tokens = torch.arange(32).view(2, 16) % 20
    for plan in (PLAN, {**PLAN, "symbols": "vocabulary", "head": "column_gather"}):
        layers = emulate(model, 4, plan, "none")
        torch.testing.assert_close(model(tokens), dense(tokens), rtol=1e-5, atol=1e-6)
        model(tokens).square().mean().backward()
        dense(tokens).square().mean().backward()
        restore(model, layers)
        for x, y in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-7)
    assert type(model.blocks[0].down) is nn.Linear


def run_compressed_model(rank: int, ranks: int) -> list[torch.Tensor]:
    model = _model()
    tp.compress(model, None, "int4", PLAN, backward_codec="int8", latency=False)
    return _results(model)


def _model() -> demo.GPT:
    torch.manual_seed(0)
    return demo.GPT(SHAPE)


def _results(model: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(32).view(2, 16) % 20
    logits = model(tokens)
    logits.square().mean().backward()
    gradient = model.get_parameter("symbols.weight").grad
    assert gradient is not None
    return [logits.detach(), gradient]


@pytest.mark.slow
def test_an_emulated_model_equals_that_of_real_ranks() -> None:
    model = _model()
    emulate(model, 2, PLAN, "int4", backward_codec="int8")
    expected = _results(model)
    for results in run_ranks(run_compressed_model, 2):
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_invalid_arguments_are_refused() -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv: 192 output features are not divisible by 5 ranks"):
        emulate(model, 5, PLAN)
    with pytest.raises(ValueError, match="ranks: expected 1 or more, got 0"):
        emulate(model, 0, PLAN)
    with pytest.raises(ValueError, match="algorithm: 'ring'; valid: auto, direct"):
        emulate_all_reduce([torch.zeros(4)] * 2, "int8", "ring")
    with pytest.raises(ValueError, match=r"codec: exact.* cannot be emulated"):
        emulate_all_reduce([torch.zeros(4)] * 2, "exact")
    assert type(model.blocks[0].down) is nn.Linear
