"""Errors of parameters are measured, reported and guarded; what was asked for and is not compressed is logged once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common

import dtcomm
from dtcomm import fsdp
from dtcomm.codecs import codec
from dtcomm.codecs.spec import CODECS
from dtcomm.compress.guard import CompressionHarmful, Guard
from dtcomm.compress.spec import gaussian_error
from dtcomm.fsdp.options import MAX_DIFFERENCE_ERROR
from dtcomm.launch.ranks import run_ranks
from dtcomm.profiling.summary import format_bytes
from tests.ranks.fsdp.models import WIDTH, Net, sharded, train
from tests.support.rank_tests import on_ranks


def seen_and_exact(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first block's parameters as its forward pass sees them, and exactly."""
    seen: list[torch.Tensor] = []
    block = model.blocks[0]

    def keep(module: nn.Module, *_: Any) -> None:
        seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]))

    handle = block.up.register_forward_pre_hook(lambda *_: keep(block))
    with torch.no_grad():
        model(torch.zeros(1, WIDTH))
    handle.remove()
    return seen[0], torch.cat([p.full_tensor().detach().flatten() for p in block.parameters()])


@pytest.mark.parametrize("spec", ["int4", "fp8_e4m3"])
@on_ranks(2)
def test_errors_of_parameters_are_in_the_report(rank: int, ranks: int, spec: str) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    state = fsdp.compress(model, "none", spec, sample_every=2, guard=None)
    assert all(not kinds for kinds in state.report().modules.values())
    model(torch.ones(2, WIDTH)).sum().backward()
    first = state.report().modules["blocks.0"]["parameters"].relative_error
    seen, exact = seen_and_exact(model)
    expected = float(torch.linalg.vector_norm(seen - exact) / torch.linalg.vector_norm(exact))
    assert first is not None
    # The report has the error of this rank's own shard.
    assert 0.8 * expected < first < 1.2 * expected, (first, expected)
    assert f"{first:.1e}" in str(state.report())
    largest = max(kinds["parameters"].relative_error for kinds in state.report().modules.values())
    (metric,) = [metric for metric in state.metrics() if metric.name == "dtcomm_relative_error"]
    assert (metric.value, metric.labels["what"]) == (largest, "parameters")
    assert metric.labels["codec"] == spec
    # It is measured every second step only, and once a step: gathers of evaluation and backward do not count.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(torch.ones(2, WIDTH)).sum().backward()
    assert state.report().modules["blocks.0"]["parameters"].relative_error == first
    model(torch.ones(2, WIDTH)).sum().backward()
    assert state.report().modules["blocks.0"]["parameters"].relative_error == 0.0


@on_ranks(2)
def test_the_error_of_differences_is_relative_to_the_parameters(rank: int, ranks: int) -> None:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, "none", "delta:int4", sample_every=1)
    train(model, rank, steps=1)
    assert state.report().modules["blocks.0"]["parameters"].relative_error is None  # whole values were sent
    train(model, rank, steps=3)
    error = state.report().modules["blocks.0"]["parameters"].relative_error
    # It is relative to the parameters, not to the differences, of which int4 loses about 10 %.
    assert error is not None and 0 < error < 0.01


def updates_behind(spec: str) -> float:
    """Return how many updates differences in a codec leave behind, if all updates have the same direction."""
    parsed = codec(spec)
    update = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    exact, reference = torch.zeros_like(update), torch.zeros_like(update)
    for _ in range(300):
        exact += update
        difference = exact - reference
        reference += dtcomm.decode(parsed, dtcomm.encode(parsed, difference), difference.numel())
    return float(torch.linalg.vector_norm(exact - reference) / torch.linalg.vector_norm(update))


def test_the_limit_of_differences_keeps_parameters_within_one_update() -> None:
    behind = {spec: updates_behind(spec) for spec in (*CODECS, "int2:symmetric=false") if spec != "randk"}
    for spec, updates in behind.items():
        if gaussian_error(codec(spec)) <= MAX_DIFFERENCE_ERROR:
            assert updates < 1, (spec, updates)
    assert behind["sign"] > 10 and behind["topk"] > 10
    assert gaussian_error(codec("int2:symmetric=false")) <= MAX_DIFFERENCE_ERROR  # the limit excludes no more


@on_ranks(2)
def test_the_guard_sees_errors_of_parameters(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    # Of parameters nothing is sent later, so the guard holds sparse codecs to its limit as well.
    state = fsdp.compress(model, "int8", "topk", allow_inaccurate=True, sample_every=1)
    for _ in range(8):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        model.zero_grad()
    report = state.report()
    assert {(event.kind, event.action) for event in state.events} == {("error", "finer")}, state.events
    assert {event.name for event in state.events} == {
        f"{name}, parameters" for name in ("(root)", "blocks.0", "blocks.1")
    }
    for kinds in report.modules.values():
        assert kinds["gradients"].codec == "int8"  # only the parameters' codec became more precise
        assert kinds["parameters"].codec not in ("topk", "topk:ratio=0.04")
    resumed = fsdp.compress(sharded(mesh), "int8", "topk", allow_inaccurate=True)
    resumed.load_state_dict(state.state_dict())
    name = "blocks.0, parameters"
    assert resumed.guard.current_spec(name, resumed.parameters) == state.guard.current_spec(
        name, state.parameters
    )
    # One large weight per block spoils the resolution of all others.
    model = sharded(mesh)
    fsdp.compress(model, "none", "int4:block=4096", guard=Guard(on_error="error"), sample_every=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().view(-1)[::64] = 1e4  # type: ignore[attr-defined]
    with pytest.raises(CompressionHarmful, match=r"error of .*parameters"):
        for _ in range(3):
            model(torch.ones(2, WIDTH)).square().mean().backward()


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Records:
        logging.getLogger("dtcomm").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("dtcomm").removeHandler(self)


def lines_of(rank: int, ranks: int, kind: str) -> tuple[list[str], list[str], str]:
    """Train two steps; return the lines logged in the first, those of the second, and the report's first line."""
    mesh = init_device_mesh("cpu", (ranks,))
    dtype, options, policy = torch.float32, {"gradients": "int8", "parameters": "int8"}, {}
    torch.manual_seed(0)
    model: nn.Module = Net()
    if kind == "float64":
        dtype = torch.float64
    elif kind == "float64 gradients":
        dtype, options = torch.float64, {"gradients": "int8"}
    elif kind == "float64 parameters":
        dtype, options = torch.float64, {"gradients": "none", "parameters": "int8"}
    elif kind == "same size":
        options, policy = (
            {"gradients": "none", "parameters": "bf16"},
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        )
    model = model.to(dtype)
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model.double(), device_id=torch.device("cpu"))
        options, dtype = {"gradients": "int8"}, torch.float64
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
    found = []
    state = fsdp.compress(model, **options)  # type: ignore[arg-type]
    for _ in range(2):
        with Records() as records:
            if kind == "inference":
                with torch.no_grad():
                    model.double()(torch.ones(2, WIDTH, dtype=torch.float64))
            else:
                model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
        found.append(records.lines)
    with Records() as records:
        first_line = str(state.report()).splitlines()[0]
    found[1] += records.lines
    return found[0], found[1], first_line


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "float64",
            "parameters of all 3 modules (int8 does not support float64); "
            "gradients of all 3 modules (int8 does not support float64)",
        ),
        ("float64 gradients", "gradients of all 3 modules (int8 does not support float64)"),
        ("float64 parameters", "parameters of all 3 modules (int8 does not support float64)"),
        ("fsdp1", "gradients of the only module (int8 does not support float64)"),
        ("same size", "parameters of all 3 modules (bf16 would not make bfloat16 smaller)"),
        ("inference", "parameters of all 3 modules (int8 does not support float64)"),
    ],
)
def test_what_is_not_compressed_is_logged_once_and_heads_the_report(kind: str, text: str) -> None:
    expected = f"nothing is compressed although asked for: {text}"
    for rank, (first, second, head) in enumerate(run_ranks(lines_of, 2, kind)):
        # Every rank has the same to say, so the first one says it.
        assert first == ([f"dtcomm.fsdp: {expected}; see state.report()"] if rank == 0 else []), first
        assert second == []
        assert head == expected


def lines_of_small_module(rank: int, ranks: int) -> tuple[list[str], str]:
    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1, bias=False), nn.LayerNorm(1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with Records() as records:
        state = fsdp.compress(model, "int8", "int8")
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
    report = state.report()
    assert report.modules["0"]["gradients"].codec == "int8"
    small = report.modules["2"]["gradients"]
    assert small.codec == "none" and small.wire_bytes >= small.plain_bytes
    return records.lines, str(report).splitlines()[0]


def test_modules_too_small_to_compress_are_named() -> None:
    reason = "1 of 3 modules with 0% of the elements, 2 (int8 would not make float32 smaller)"
    expected = f"not compressed although asked for: parameters of {reason}; gradients of {reason}"
    (first, head), (second, _) = run_ranks(lines_of_small_module, 2)
    assert first == [f"dtcomm.fsdp: {expected}; see state.report()"] and second == []
    assert head == expected


def lines_of_several_groups(rank: int, ranks: int) -> tuple[list[str], str]:
    mesh = init_device_mesh("cpu", (ranks,))
    group = dist.new_group(list(range(ranks)))
    other = _fsdp_common.FSDPMeshInfo(DeviceMesh.from_group(group, "cpu"), shard_mesh_dim=0)
    in_other = _fsdp_common.ShardPlacementResult(None, other)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    weight = model[0].weight
    fully_shard(model[0], mesh=mesh, shard_placement_fn=lambda p: in_other if p is weight else None)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="replicas: 0 has its parameters in 2 groups"):
        fsdp.compress(model, "int8", replicas=mesh)
    with Records() as records:
        state = fsdp.compress(model, "int8", "int8")
        model(torch.ones(2, 64)).sum().backward()
    return records.lines, str(state.report()).splitlines()[0]


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one group for each module"
)
def test_modules_that_torch_does_not_let_compress_are_named() -> None:
    reason = (
        "1 of 2 modules, 0 (its parameters are in 2 groups, for which torch accepts no custom collectives; apply "
        "fully_shard to the layers of each mesh by themselves)"
    )
    expected = f"not compressed although asked for: parameters of {reason}; gradients of {reason}"
    (first, head), (second, _) = run_ranks(lines_of_several_groups, 2)
    assert first == [f"dtcomm.fsdp: {expected}; see state.report()"] and second == []
    assert head == expected


def lines_without_reason(rank: int, ranks: int) -> list[str]:
    mesh = init_device_mesh("cpu", (ranks,))
    with Records() as records:
        for options in ({}, {"gradients": "none"}, {"preset": "sdp4bit"}, {"exclude": "blocks.0"}):
            model = sharded(mesh)
            state = fsdp.compress(model, **options)  # type: ignore[arg-type]
            train(model, rank, steps=2)
            assert str(state.report()).startswith("dtcomm FSDP: ")
    return records.lines


def test_nothing_is_logged_if_everything_is_compressed() -> None:
    assert run_ranks(lines_without_reason, 2) == [[], []]


def lines_of_feedback(rank: int, ranks: int) -> list[str]:
    mesh = init_device_mesh("cpu", (ranks,))
    with Records() as records:
        for options in (
            {"gradients": "topk"},
            {"gradients": "topk", "residual": "bf16"},
            {"gradients": "topk", "feedback": True},
            {"gradients": "int8"},
        ):
            fsdp.compress(sharded(mesh), **options)  # type: ignore[arg-type]
    return records.lines


def test_memory_of_feedback_that_was_not_asked_for_is_logged() -> None:
    first, second = run_ranks(lines_of_feedback, 2)
    assert len(first) == 2 and second == []
    numel = sum(parameter.numel() for parameter in Net().parameters())
    for line, size in zip(first, (4 * numel, 2 * numel), strict=True):
        assert f"error feedback keeps {format_bytes(size)} of residuals" in line
        assert line.endswith(" on every rank (auto: topk loses 96%)")
