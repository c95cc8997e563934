"""Arguments of `dtcomm.fsdp.compress`: what is refused, `exclude`, and a second `compress`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtcomm import fsdp
from dtcomm.compress.policy import Policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.fsdp.options import PRESETS
from tests.ranks.fsdp.models import WIDTH, Net, sharded, train
from tests.support.rank_tests import on_ranks

# (arguments, words of the error in their order)
INACCURATE: list[tuple[dict[str, Any], str]] = [
    ({"parameters": "topk"}, "parameters: topk loses 9.%.*limit.*20%.*allow_inaccurate=True"),
    ({"parameters": "topk:ratio=0.1,values=int8"}, "parameters: topk.*allow_inaccurate=True"),
    ({"parameters": "int2"}, "parameters: int2 loses 6.%.*allow_inaccurate=True"),
    ({"parameters": "sign"}, "parameters: sign loses 60%.*allow_inaccurate=True"),
    ({"parameters": "randk"}, "parameters: randk loses.*allow_inaccurate=True"),
    ({"parameters": "int8/int2"}, "parameters: int2 loses.*allow_inaccurate=True"),
    ({"parameters": "delta:randk"}, "parameters: randk loses.*difference.*50%.*allow_inaccurate=True"),
    ({"parameters": "delta:topk"}, "parameters: topk loses.*difference.*allow_inaccurate=True"),
    ({"gradients": "sign", "feedback": False}, "gradients: sign loses 60%.*feedback=True.*allow_inaccurate"),
    ({"gradients": "topk", "feedback": False}, "gradients: topk.*feedback=True.*allow_inaccurate=True"),
    ({"gradients": "randk", "feedback": False}, "gradients: randk.*feedback=True.*allow_inaccurate=True"),
    ({"gradients": "int8/int2", "feedback": False}, "gradients: int2.*feedback=True.*allow_inaccurate=True"),
]

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"feedback": "ef21"}, ValueError, "feedback: 'ef21' .*dtcomm.ddp.*valid: True, False, 'auto'"),
    ({"feedback": "on"}, ValueError, "feedback: .*'on'.*valid: True, False, 'auto'"),
    ({"feedback": 1}, TypeError, "feedback: .*got int"),
    ({"gradients": "loco:int4", "feedback": False}, ValueError, "feedback: False contradicts.*loco:int4"),
    ({"gradients": "auto"}, ValueError, "gradients: 'auto' .*dtcomm.ddp"),
    ({"parameters": "auto"}, ValueError, "parameters: 'auto' .*dtcomm.ddp"),
    ({"gradients": "powersgd:rank=2"}, ValueError, "gradients: 'powersgd' .*dtcomm.ddp"),
    ({"gradients": "dgc"}, ValueError, "gradients: 'dgc' .*dtcomm.ddp"),
    ({"gradients": PowerSGD(rank=2)}, TypeError, "gradients: .*got PowerSGD.*dtcomm.ddp"),
    ({"gradients": Policy.parse("* -> int8")}, TypeError, "gradients: .*got Policy.*exclude="),
    ({"gradients": "ndim<2 -> none, * -> int8"}, ValueError, "gradients: .*policy.*dtcomm.ddp.*exclude="),
    ({"gradients": "eff:int4"}, ValueError, "gradients: .*'eff'.*did you mean 'ef:int4'.*'ef:', 'loco:'"),
    ({"parameters": "dleta:int4"}, ValueError, "parameters: .*'dleta'.*did you mean 'delta:int4'"),
    ({"gradients": "ef:intt8:block=64"}, ValueError, "'intt8'.*did you mean 'ef:int8:block=64'"),
    ({"gradients": "int8/imt4"}, ValueError, "gradients: .*'imt4'.*did you mean 'int8/int4'"),
    ({"gradients": "INT8"}, ValueError, "gradients: .*'INT8'.*did you mean 'int8'"),
    ({"gradients": ""}, ValueError, "gradients: unknown codec or prefix ''"),
    ({"gradients": "int8,int4"}, ValueError, "gradients: .*'int8,int4'.*did you mean 'int8/int4'"),
    ({"gradients": "ef:loco:int4"}, ValueError, "gradients: .*one prefix"),
    ({"parameters": "ef:int8"}, ValueError, "parameters: 'ef:' is not valid here.*'delta:'"),
    ({"preset": "zero+"}, ValueError, r"preset: 'zero\+' is not one of .*did you mean 'zero\+\+'"),
    ({"preset": 1}, TypeError, "preset: .*got int"),
    ({"residual": "int9"}, ValueError, "residual: 'int9'.*fp32, bf16, int8"),
    ({"residual": "bf16"}, ValueError, "residual: 'bf16' .*feedback=True"),
    ({"guard": True}, TypeError, "guard: expected a dtcomm.ddp.Guard or None, got bool"),
    ({"sample_every": "5"}, TypeError, "sample_every: expected an integer, got .5."),
    ({"sample_every": True}, TypeError, "sample_every: expected an integer, got True"),
    ({"sample_every": -1}, ValueError, "sample_every=-1: expected 0 or more"),
    ({"seed": 1.5}, TypeError, "seed: expected an integer, got 1.5"),
    ({"replicas": 2}, TypeError, "replicas: expected .*got int"),
    ({"allow_inaccurate": "yes"}, TypeError, "allow_inaccurate: expected .*got str"),
    ({"exclude": 3}, TypeError, "exclude: expected .*got int"),
    ({"exclude": [3]}, TypeError, "exclude: expected .*int"),
    ({"exclude": "block.0"}, ValueError, r"exclude: 'block.0' matches nothing.*did you mean 'blocks.0'"),
    ({"exclude": "blocks.0.norm*"}, ValueError, r"exclude: .*a part of 'blocks.0'.*fully_shard.*0.norm"),
    ({"exclude": "*"}, ValueError, "exclude: .*no module to compress"),
]


def forward_hooks(model: nn.Module) -> tuple[int, int]:
    return len(model._forward_pre_hooks), len(model._forward_hooks)


@on_ranks(2, fresh=True)
def test_wrong_arguments_are_refused_where_they_are_given(rank: int, ranks: int) -> None:
    """Every wrong call is refused and leaves the model as it was."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    hooks = forward_hooks(model)
    for arguments, words in INACCURATE:
        with pytest.raises(ValueError, match=words):
            fsdp.compress(model, **arguments)
    for arguments, error, words in WRONG:
        with pytest.raises(error, match=words):
            fsdp.compress(model, **arguments)
    two_dimensional = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"replicas: .*one dimension"):
        fsdp.compress(model, replicas=two_dimensional)
    for value in (3, Net(), DistributedDataParallel(Net())):
        with pytest.raises(TypeError, match="model: "):
            fsdp.compress(value)  # type: ignore[arg-type]
    assert forward_hooks(model) == hooks
    expected = train(sharded(mesh), rank)
    for name, value in train(model, rank).items():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_a_flag_allows_inaccurate_codecs(rank: int, ranks: int) -> None:
    """One flag allows what is inaccurate; what is accurate, or fed back, needs none."""
    mesh = init_device_mesh("cpu", (ranks,))
    for arguments, _ in INACCURATE:
        fsdp.compress(sharded(mesh), **arguments, allow_inaccurate=True)
    accurate: list[dict[str, Any]] = [
        {"parameters": "int4"},
        {"parameters": "mxfp4"},
        {"parameters": "delta:int3"},
        {"parameters": "topk:ratio=1"},  # a property of the codec is refused, not a name
        {"parameters": "exact"},
        {"gradients": "int4", "feedback": False},
        {"gradients": "sign", "feedback": True},
        {"gradients": "ef:topk"},
        {"gradients": "loco:topk:ratio=0.1"},
        *({"preset": preset} for preset in PRESETS),
    ]
    for arguments in accurate:
        fsdp.compress(sharded(mesh), **arguments)


@on_ranks(2)
def test_feedback_is_on_by_default_where_the_codec_needs_it(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for spec in ("int8", "int4", "loco:int4"):
        assert str(fsdp.compress(sharded(mesh), spec).gradients) == spec
    for spec in ("int8/int2", "sign", "topk:ratio=0.1"):
        assert str(fsdp.compress(sharded(mesh), spec).gradients) == f"ef:{spec}"
    model = sharded(mesh)
    state = fsdp.compress(model, "topk:ratio=0.1", residual="bf16")
    train(model, rank)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert 2 * numel <= state.report().residual_bytes < 2.2 * numel  # shards are padded


@on_ranks(2)
def test_a_second_compress_is_refused_until_the_first_is_detached(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    expected = train(sharded(mesh), rank)
    model = sharded(mesh)
    hooks = forward_hooks(model)
    options: dict[str, Any] = {"gradients": "ef:int4", "parameters": "delta:int8"}
    first = fsdp.compress(model, **options)
    train(model, rank)
    report = str(first.report())
    for again in (model, model.blocks[0]):
        with pytest.raises(RuntimeError, match=r"model: .*compressed already.*detach\(\)"):
            fsdp.compress(again)
    first.detach()
    first.detach()
    assert forward_hooks(model) == hooks
    assert first.report().memory["references"] == 0
    # The model is FSDP's own again.
    with torch.no_grad():
        for parameter, initial in zip(model.parameters(), sharded(mesh).parameters(), strict=True):
            parameter.copy_(initial)
    for name, value in train(model, rank).items():
        assert torch.equal(value, expected[name]), name
    assert str(first.report()).splitlines()[:3] == report.splitlines()[:3]
    second = fsdp.compress(model, **options)
    train(model, rank)
    assert second.report().modules["blocks.0"]["gradients"].calls == 3
    assert first.report().modules["blocks.0"]["gradients"].calls == 3
    # Parts of a model may be compressed apart from each other, but not again with the whole.
    parts = sharded(mesh)
    states = [fsdp.compress(block, "int4") for block in parts.blocks]
    with pytest.raises(RuntimeError, match=r"blocks.0.*compressed already"):
        fsdp.compress(parts)
    train(parts, rank)
    assert all(state.report().modules[""]["gradients"].calls == 3 for state in states)


@on_ranks(2)
def test_fsdp1_is_detached_too(rank: int, ranks: int) -> None:
    def gradient(model: nn.Module) -> torch.Tensor:
        model.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
        model(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    expected = gradient(model)
    state = fsdp.compress(model, "int4")
    assert not torch.equal(gradient(model), expected)
    with pytest.raises(RuntimeError, match=r"model: .*compressed already.*detach\(\)"):
        fsdp.compress(model)
    state.detach()
    assert torch.equal(gradient(model), expected)
    fsdp.compress(model, "int8")
    gradient(model)


@pytest.mark.parametrize(
    "options",
    [{"gradients": "int8", "parameters": "int8"}, {"gradients": "ef:int4", "parameters": "delta:int4"}],
    ids=str,
)
@on_ranks(2)
def test_excluded_modules_stay_exact(rank: int, ranks: int, options: dict[str, Any]) -> None:
    """Excluded modules travel as they are: the first block's parameters reach its forward exactly."""
    mesh = init_device_mesh("cpu", (ranks,))
    for pattern in ("blocks.0", "blocks.0.*", ["*.0", "(root)"], "head.*"):
        model = sharded(mesh)
        state = fsdp.compress(model, **options, exclude=pattern)
        train(model, rank)
        modules = state.report().modules
        excluded = {"head.*": {""}, "blocks.0": {"blocks.0"}, "blocks.0.*": {"blocks.0"}}.get(
            str(pattern), {"", "blocks.0"}
        )
        for name, kinds in modules.items():
            for kind in ("gradients", "parameters"):
                traffic = kinds[kind]
                if name in excluded:
                    assert traffic.codec == "none" and traffic.reason.startswith("exclude: "), (name, traffic)
                    assert (
                        0 < traffic.plain_bytes <= traffic.wire_bytes < 1.1 * traffic.plain_bytes
                    )  # padding
                else:
                    assert traffic.codec == str(state.gradients if kind == "gradients" else state.parameters)
        assert "exclude: " in str(state.report())
        assert not state.report().uncompressed
        if "blocks.0" in excluded:
            seen: list[torch.Tensor] = []
            up = model.blocks[0].up
            up.register_forward_pre_hook(
                lambda module, _, seen=seen: seen.append(module.weight.detach().clone())
            )
            model(torch.zeros(1, WIDTH))
            assert torch.equal(seen[0], up.weight.full_tensor().detach())
        if options["gradients"].startswith("ef:"):
            excluded_names = {name for name, _ in model.blocks[0].named_parameters(prefix="blocks.0")}
            saved = set(state.state_dict()["residuals"])
            assert saved and ("blocks.0" not in excluded or not saved & excluded_names)


@on_ranks(2)
def test_exclude_covers_what_a_module_contains(rank: int, ranks: int) -> None:
    """The name of a module stands for all that is in it; FSDP1's units are excluded alike."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = fsdp.compress(model, exclude="blocks.1")
    train(model, rank)
    reasons = {name: kinds["gradients"].reason for name, kinds in state.report().modules.items()}
    assert {name for name, reason in reasons.items() if reason} == {"blocks.1", "blocks.1.up"}
    unit = FullyShardedDataParallel(Net().blocks[0], device_id=torch.device("cpu"))
    fsdp1 = FullyShardedDataParallel(nn.Sequential(unit, nn.Linear(WIDTH, 64)), device_id=torch.device("cpu"))
    state = fsdp.compress(fsdp1, exclude="0")
    fsdp1(torch.ones(2, WIDTH)).sum().backward()
    by_module = state.report().modules
    assert (by_module["0"]["gradients"].codec, by_module[""]["gradients"].codec) == ("none", "int8")
