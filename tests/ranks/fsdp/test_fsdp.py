"""FSDP with compressed collectives compared to plain FSDP: modes, odd sizes, dtypes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from dtcomm import fsdp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net, sharded, train
from tests.support.rank_tests import on_ranks

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def compare(rank: int, ranks: int, codecs: dict[str, Any], options: dict[str, Any], tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    accumulate, prefetch = options.pop("accumulate", False), options.pop("prefetch", False)
    Net.reentrant = options.pop("reentrant", False)
    expected = train(sharded(mesh, **options), rank, accumulate=accumulate)
    model = sharded(mesh, **options)
    state = fsdp.compress(model, **codecs)
    if prefetch:
        model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])  # type: ignore[operator]
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])  # type: ignore[operator]
        model.unshard(async_op=True)  # type: ignore[operator]
    actual = train(model, rank, accumulate=accumulate)
    for name, value in expected.items():
        if tolerance == 0:
            assert torch.equal(actual[name], value), name
        else:
            error = torch.linalg.vector_norm(actual[name] - value) / torch.linalg.vector_norm(value)
            assert error < tolerance, (name, float(error))
    report = state.report()
    assert set(report.modules) == {"", "blocks.0", "blocks.1"}
    for by_kind in report.modules.values():
        assert by_kind["gradients"].calls == 3 and by_kind["parameters"].calls >= 3
    if codecs["gradients"] == "int8":
        traffic = report.modules["blocks.0"]["gradients"]
        assert traffic.wire_bytes < 0.35 * traffic.plain_bytes
    assert "blocks.1" in str(report) and report.to_dict()["modules"]["blocks.1"]["gradients"]["calls"] == 3


NONE = {"gradients": "none", "parameters": "none"}
LOSSY = {"gradients": "int8", "parameters": "int8:block=64"}


@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_forward": False}, {"accumulate": True}, {"prefetch": True}, {"reentrant": True}],
    ids=str,
)
def test_uncompressed_equals_plain_fsdp_bit_for_bit_on_two_ranks(options: dict[str, Any]) -> None:
    run_ranks(compare, 2, NONE, options, 0.0)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "codecs",
    [LOSSY, LOSSY | {"feedback": True}, {"gradients": "int8:round=stochastic", "parameters": "bf16"}],
    ids=str,
)
def test_compressed_training_is_close(codecs: dict[str, Any], ranks: int) -> None:
    run_ranks(compare, ranks, codecs, {}, 0.1)


def test_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(compare, 2, NONE, {"mp_policy": policy}, 0.0)
    run_ranks(compare, 2, LOSSY, {"mp_policy": policy, "prefetch": True}, 0.1)


@pytest.mark.skipif(TORCH < (2, 15), reason="grad_dtype is followed from torch 2.15 on")
@on_ranks(2)
def test_reductions_follow_grad_dtype(rank: int, ranks: int) -> None:
    """Gradients have the ``grad_dtype`` of their parameters, sorted by it in one message, and residuals their names."""
    mesh = init_device_mesh("cpu", (ranks,))

    def model_of(**options: Any) -> Net:
        model = sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options))
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.grad_dtype = torch.bfloat16
        return model

    for options in ({}, {"reduce_dtype": torch.float32}, {"reduce_dtype": torch.bfloat16}):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
        plain, exact, lossy = (model_of(**options) for _ in range(3))
        fsdp.compress(exact, **NONE)
        state = fsdp.compress(lossy, "int2", feedback=True)
        for model in (plain, exact, lossy):
            model(x).float().square().mean().backward()
        residuals = state.state_dict()["residuals"]
        for (name, expected), same, near in zip(
            plain.named_parameters(), exact.parameters(), lossy.parameters(), strict=True
        ):
            assert same.grad.dtype == expected.grad.dtype == (same.grad_dtype or torch.bfloat16), name
            assert torch.equal(same.grad.full_tensor(), expected.grad.full_tensor()), name
            lost = residuals[name].double()
            torch.distributed.all_reduce(lost)
            full = expected.grad.full_tensor().double().flatten()
            kept = near.grad.full_tensor().double().flatten() + lost / ranks
            torch.testing.assert_close(kept, full, atol=0.02 * float(full.abs().max()), rtol=0)


@pytest.mark.skipif(TORCH < (2, 15), reason="param_dtype_override_fn is of torch 2.15")
def test_parameters_that_keep_their_dtype() -> None:
    """Norms stay fp32 while the rest travels in bf16: two dtypes in one message."""
    options: dict[str, Any] = {"param_dtype": torch.bfloat16, "param_dtype_override_fn": keep_norms}
    for reduce_dtype in (None, torch.float32):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, **options)
        run_ranks(compare, 2, NONE, {"mp_policy": policy}, 0.0)
        run_ranks(compare, 2, LOSSY, {"mp_policy": policy}, 0.1)


def keep_norms(parameter: nn.Parameter) -> torch.dtype | None:
    """Keep the parameters of LayerNorm, which begin as ones and zeros."""
    return parameter.dtype if parameter.detach().unique().numel() == 1 else None


@on_ranks(2)
def test_feedback_conserves_mass(rank: int, ranks: int) -> None:
    """Reduced gradients plus residuals equal the sum of the inputs."""
    mesh = init_device_mesh("cpu", (ranks,))
    plain, model = sharded(mesh), sharded(mesh)
    state = fsdp.compress(model, "int8", feedback=True)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    for variant in (plain, model):
        variant(x).square().mean().backward()
    residuals = state.state_dict()["residuals"]
    assert set(residuals) == {name for name, _ in model.named_parameters()}
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        lost = residuals[name].double()
        torch.distributed.all_reduce(lost)
        difference = p.grad.full_tensor().double() - q.grad.full_tensor().double()
        assert torch.allclose(difference.flatten() * ranks, lost, atol=1e-6), name
    assert state.report().residual_bytes >= sum(4 * r.numel() for r in residuals.values())


@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
    ids=str,
)
@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-6), ("int8", 0.05)])
@on_ranks(2)
def test_fsdp1(rank: int, ranks: int, strategy: ShardingStrategy, codec: str, tolerance: float) -> None:
    results = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            Net(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=False
        )
        state = fsdp.compress(model, codec) if compressed else None
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
        model(x).square().mean().backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        if state is not None:
            assert "(root)" in str(state.report()) and "torch gathers the parameters, uncompressed" in str(
                state.report()
            )
    error = torch.linalg.vector_norm(results[1] - results[0]) / torch.linalg.vector_norm(results[0])
    assert error <= tolerance, float(error)


@on_ranks(2)
def test_fsdp1_error_feedback(rank: int, ranks: int) -> None:
    """Each unit has its own residual, saved by parameter name, and a resumed run continues bit for bit."""

    def make_model(**options: Any) -> tuple[nn.Module, fsdp.FSDPState]:
        torch.manual_seed(0)
        wrap = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            Net(), auto_wrap_policy=wrap, device_id=torch.device("cpu"), **options
        )
        return model, fsdp.compress(model, "ef:int4", sample_every=0)

    def step(model: nn.Module, number: int) -> torch.Tensor:
        model.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    uninterrupted, state = make_model()
    for number in range(2):
        step(uninterrupted, number)
    saved = state.state_dict()
    assert {name.partition(".")[0] for name in saved["residuals"]} == {"blocks", "head"}
    assert "blocks.0.up.weight" in saved["residuals"] and len(state.report().modules) == 6
    resumed, resumed_state = make_model()
    resumed_state.load_state_dict(saved)
    assert torch.equal(step(uninterrupted, 2), step(resumed, 2))
    # If torch pads between parameters, the residual is saved flat, for the whole unit.
    padded, state = make_model(use_orig_params=True)
    step(padded, 0)
    assert state.report().residual_bytes > 0


@on_ranks(2)
def test_invalid_arguments_are_refused(rank: int, ranks: int) -> None:
    with pytest.raises(TypeError, match="expected a module to which fully_shard was applied, got Net"):
        fsdp.compress(Net())
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="parameters: FSDP1 has a hook for gradients only"):
        fsdp.compress(model, parameters="int8")
    mesh = init_device_mesh("cpu", (ranks,))
    odd = sharded(mesh)
    fsdp.compress(odd)
    for module in (odd, *odd.blocks):
        module.set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match="set_force_sum_reduction_for_comms"):
        odd(torch.ones(1, WIDTH)).sum().backward()


def compare_roots(rank: int, ranks: int) -> bool:
    """Whether gradients of layers that are roots of their own are complete when backward() returns."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for layer in layers:
            fully_shard(layer)
        models.append(layers)
    ours, plain = models
    fsdp.compress(ours, gradients="none")
    torch.manual_seed(rank)
    x = torch.randn(8, 64)
    results = []
    for layers in (ours, plain):
        hidden = layers[0](x)
        if rank == 1:  # the other rank is then done long before
            hidden.register_hook(lambda _: time.sleep(0.3))
        layers[2](layers[1](hidden)).square().mean().backward()
        results.append([parameter.grad.to_local().clone() for parameter in layers.parameters()])
    return all(map(torch.equal, *results))


def test_layers_without_a_common_root_have_their_gradients_after_backward() -> None:
    assert run_ranks(compare_roots, 2) == [True, True]
