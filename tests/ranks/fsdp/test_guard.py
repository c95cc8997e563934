"""Fallbacks are reported, and harmful compression is detected, reported and turned off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from dtcomm import fsdp
from dtcomm.compress.guard import CompressionHarmful, Guard
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net, sharded
from tests.support.rank_tests import on_ranks

COUNTED = "all_gather_single all_gather_into_tensor reduce_scatter_single reduce_scatter_tensor all_reduce"


def count_torch_collectives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count torch's own collectives that FSDP calls."""
    calls: Counter[str] = Counter()
    for name in COUNTED.split():
        if (inner := getattr(dist, name, None)) is None:
            continue

        def counting(*arguments: Any, name: str = name, inner: Any = inner, **options: Any) -> Any:
            calls[name] += 1
            return inner(*arguments, **options)

        monkeypatch.setattr(dist, name, counting)
    return calls


def step(model: Any) -> None:
    model(torch.ones(2, WIDTH)).float().square().mean().backward()


@on_ranks(4)
def test_every_collective_is_compressed_or_has_a_reason(rank: int, ranks: int) -> None:
    """Every module's collectives are dtcomm's, or a note says which are not and why."""
    shards = init_device_mesh("cpu", (ranks,))
    hsdp = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def frozen() -> Any:
        net = Net()
        net.blocks[0].requires_grad_(False)
        for block in net.blocks:
            fully_shard(block, mesh=shards)
        return fully_shard(net, mesh=shards)

    variants: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (sharded(shards), {"gradients": "int8", "parameters": "fp8_e4m3"}, {}),
        (sharded(shards, mp_policy=bf16), {"preset": "sdp4bit"}, {}),
        (sharded(shards, reshard_after_forward=2), {"preset": "zero++"}, {}),
        (frozen(), {"preset": "loco"}, {}),
        (sharded(hsdp), {"gradients": "int8"}, {"all_reduce": 3}),
        (sharded(hsdp["shard"]), {"gradients": "int8", "replicas": hsdp["replicate"]}, {}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        calls = count_torch_collectives(patch)
        for model, options, torch_calls in variants:
            state = fsdp.compress(model, **options)
            calls.clear()
            step(model)
            assert calls == torch_calls, (options, calls)
            report = state.report()
            modules = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
            assert set(report.modules) == modules
            for name in modules:
                noted = [note for note in report.notes if note.startswith(f"{name or '(root)'}: ")]
                assert len(noted) == ("all_reduce" in torch_calls), (name, report.notes)
                for kind, traffic in report.modules[name].items():
                    # Anything uncompressed that should be compressed has a reason.
                    spec = str(state.parameters if kind in ("parameters", "kept copies") else state.gradients)
                    assert traffic.codec == spec or traffic.reason, (name, kind, traffic)


def refine(rank: int, ranks: int) -> None:
    """With blocks of 1024, two bits lose a third of the smaller elements, so the guard raises the module's bits."""
    model = sharded(init_device_mesh("cpu", (ranks,)))
    options: dict[str, Any] = {"feedback": False, "allow_inaccurate": True, "sample_every": 1}
    state = fsdp.compress(model, "int2:block=1024", guard=Guard(error=0.1), **options)
    names = []
    for _ in range(6):
        model(torch.ones(1, WIDTH)).square().sum().backward()
        names.append(state.report().modules["blocks.0"]["gradients"].codec)
        model.zero_grad()
    assert names[0].startswith("int2") and names[-1] == "int4", names
    report = state.report()
    assert report.events["error: finer"] >= 1 and "guard: error: finer" in str(report)
    resumed = fsdp.compress(sharded(init_device_mesh("cpu", (ranks,))), "int2:block=1024", **options)
    resumed.load_state_dict(state.state_dict())
    assert str(resumed.guard.current_spec("blocks.0", resumed.gradients)) == "int4"
    errors = [
        traffic.relative_error for traffic in (by_kind["gradients"] for by_kind in report.modules.values())
    ]
    assert all(error is not None and 0 < error < 1 for error in errors)


def stop(rank: int, ranks: int) -> None:
    """All ranks detect a NaN on one rank; a diverging loss turns compression off for a while."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    fsdp.compress(model, guard=Guard(nonfinite=2), sample_every=1)
    with pytest.raises(CompressionHarmful, match="nonfinite is 2"):
        for _ in range(4):
            model(torch.full((1, WIDTH), float("nan") if rank == 0 else 1.0)).sum().backward()

    model = sharded(mesh)
    state = fsdp.compress(model, "int4", "int8", guard=Guard(steps=3), sample_every=1)
    codecs = []
    for number in range(24):
        state.observe(1.0 if number < 16 else 50.0)
        step(model)
        codecs.append(state.report().modules[""]["gradients"].codec)
        model.zero_grad()
    assert state.report().events == {"loss: uncompressed": 1}
    first = codecs.index("none")
    assert first > 16 and codecs[:first] == ["int4"] * first and codecs.count("none") == 3


def refine_fsdp1_and_optimizer(rank: int, ranks: int) -> None:
    """FSDP1 and the sharded optimizer have the same guard."""
    guard: dict[str, Any] = {"guard": Guard(error=0.1), "sample_every": 1}
    torch.manual_seed(0)
    fsdp1_model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    coarse: dict[str, Any] = {"gradients": "int2:block=1024", "feedback": False, "allow_inaccurate": True}
    state = fsdp.compress(fsdp1_model, **coarse, **guard)
    model = Net()
    optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1e-3, **coarse, **guard)
    for _ in range(6):
        fsdp1_model(torch.ones(1, WIDTH)).square().sum().backward()
        model(torch.ones(1, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for source in (state, optimizer):
        by_kind = next(iter(source.report().modules.values()))
        assert by_kind["gradients"].codec == "int4" and 0.01 < by_kind["gradients"].relative_error < 0.5
        assert {(event.kind, event.action) for event in source.events} == {("error", "finer")}
    # A diverging loss turns compression off, of parameters too.
    model = Net()  # an optimizer's hooks stay on its parameters
    guard["guard"] = Guard(steps=3)
    optimizer = fsdp.ShardedOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.0, gradients="int4", parameters="int8", **guard
    )
    for number in range(20):
        optimizer.observe(1.0 if number < 16 else 50.0)
        model(torch.ones(1, WIDTH)).square().sum().backward()
        optimizer.step()
    (bucket,) = optimizer.report().modules.values()
    assert bucket["gradients"].codec == bucket["parameters"].codec == "none"
    assert optimizer.report().events == {"loss: uncompressed": 1}


def test_the_guard_raises_precision_stops_and_turns_compression_off() -> None:
    run_ranks(refine, 2)
    run_ranks(
        refine_fsdp1_and_optimizer, 2, fresh=True
    )  # hooks on parameters outlive it and keep its groups alive
    run_ranks(stop, 2)
