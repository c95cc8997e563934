"""Kinds of feedback and DGC in the hook: the bits of simulated ranks, reports, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.support.simulated_ranks import SimulatedRanks
from tests.unit.ddp.models import SMALL_BUCKETS, backward, gradients, local_gradients, train, wrapped

#: Compressors with state, and their options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "error feedback": ("int4", {"feedback": True}),
    "no feedback": ("int4", {}),
    "stochastic": ("int4:round=stochastic", {"feedback": True, "seed": 3}),
    "in bf16": ("topk:ratio=0.05", {"residual": "bf16"}),
    "in 8 bit": ("int2", {"residual": "int8"}),
    "EF21": ("topk:ratio=0.05", {"feedback": "ef21"}),
    "DIANA": ("int4:round=stochastic", {"feedback": "diana"}),
    "EF21 of factors": ("powersgd:rank=2,factors=int8", {"feedback": "ef21"}),
    "PowerSGD": ("powersgd:rank=4", {}),
    "one factor at a time": ("powersgd:rank=2,alternate=true", {}),
    "shared positions": ("randk:ratio=0.05,positions=shared", {"seed": 3}),
    "DGC": ("dgc:ratio=0.02,clip=0.5,warmup=4", {}),
    "DGC in bf16": ("dgc:ratio=0.02,warmup=3,values=int4", {"residual": "bf16"}),
}


def compare_to_simulated_ranks(rank: int, world_size: int, spec: str, options: dict[str, Any]) -> None:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, algorithm="one_shot", sample_every=2, guard=None, **options)
    named_parameters = list(model.module.named_parameters())
    run = SimulatedRanks(spec, world_size, named_parameters, **options)
    with local_gradients(model) as mine:
        for step in range(6):
            model.zero_grad()
            backward(model, rank, step)
            by_rank: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
            for name, parameter in named_parameters:
                received = [torch.empty_like(parameter.data) for _ in range(world_size)]
                dist.all_gather(received, mine[name])
                for of_rank, gradient in zip(by_rank, received):
                    of_rank.append(gradient)
            ours = gradients(model)
            for (name, _), expected in zip(named_parameters, run.average(by_rank)):
                assert torch.equal(ours[name], expected), (step, name)
    state.report()


@pytest.mark.parametrize("kind", KINDS)
def test_the_hook_has_the_bits_of_simulated_ranks(kind: str) -> None:
    run_ranks(compare_to_simulated_ranks, 2, *KINDS[kind])


def compare_resumed(rank: int, world_size: int, spec: str, options: dict[str, Any]) -> bool:
    """Return whether a run that stopped after 3 of 7 steps and continued in a new DDP model has the same gradients."""
    uninterrupted, first = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    ddp.compress(uninterrupted, spec, **options)
    expected = train(uninterrupted, rank, range(7))[3:]
    state = ddp.compress(first, spec, **options)
    train(first, rank, range(3))
    saved, weights = state.state_dict(), first.module.state_dict()
    second = DistributedDataParallel(wrapped(1).module, **SMALL_BUCKETS)
    second.module.load_state_dict(weights)
    ddp.compress(second, spec, **options).load_state_dict(saved)
    continued = train(second, rank, range(3, 7))
    return all(torch.equal(a[name], b[name]) for a, b in zip(expected, continued) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_continues_bit_for_bit(kind: str) -> None:
    assert run_ranks(compare_resumed, 2, *KINDS[kind]) == [True] * 2


MODES: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True, **SMALL_BUCKETS},
    "bucket_view": {"gradient_as_bucket_view": True, **SMALL_BUCKETS},
    "find_unused": {"find_unused_parameters": True, **SMALL_BUCKETS},
}


def train_and_compare_ranks(
    rank: int, world_size: int, spec: str, options: dict[str, Any], mode: str
) -> bool:
    model = wrapped(dtype=torch.bfloat16, **MODES[mode])
    ddp.compress(model, spec, **options)
    for step in range(6):
        model.zero_grad()
        backward(model, rank, step % 2, branch=mode != "find_unused" or (step + rank) % 3 == 0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(theirs, mine)
    return all(torch.equal(mine, other) for other in theirs) and bool(torch.isfinite(mine).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in 8 bit", "EF21", "PowerSGD", "one factor at a time", "DGC"])
def test_weights_stay_equal_on_all_ranks(mode: str, kind: str) -> None:
    assert run_ranks(train_and_compare_ranks, 2, *KINDS[kind], mode) == [True] * 2


def train_and_report(
    rank: int, world_size: int, spec: str, options: dict[str, Any]
) -> tuple[dict[str, int], str]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, **options)
    train(model, rank, range(5))
    return state.report().memory, str(state.report())


def test_the_report_states_the_memory() -> None:
    memory, text = run_ranks(train_and_report, 2, "int8", {"feedback": True, "residual": "bf16"})[0]
    matrices = 3 * 48 * 48
    assert memory["residuals in bf16"] == pytest.approx(2 * matrices, rel=0.01)
    assert 4 * 48 * 48 <= memory["fp32 within a step"] <= 4 * matrices
    assert "13.5 KiB of residuals in bf16" in text
    memory, text = run_ranks(train_and_report, 2, "topk", {"feedback": "ef21"})[0]
    assert memory == {"references": 8 * matrices}
    assert "feedback ef21" in text
    memory, text = run_ranks(train_and_report, 2, "dgc:warmup=3", {})[0]
    assert memory == {"residuals in fp32": 4 * matrices, "velocities": 4 * (matrices + 4 * 48)}
    assert "\ngradients  dgc" in text
