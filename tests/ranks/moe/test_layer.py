"""The layer of experts: the same on any number of ranks, with DDP, capacity, statistics and saved states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dtcomm import moe
from dtcomm.launch.ranks import run_ranks

WIDTH, EXPERTS, TOKENS = 24, 8, 32


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = moe.MoE(
            WIDTH,
            EXPERTS,
            lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
            **options,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + self.mixture(x)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(TOKENS, 2, WIDTH, generator=generator)
    return inputs, torch.randn(TOKENS, 2, WIDTH, generator=generator)


def step(rank: int, ranks: int, variants: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Return for each variant result and gradients: this rank's result and experts, averages of the others."""
    results = []
    for options in variants:
        torch.manual_seed(5 if rank == 0 else 100 + rank)  # rank 0's state decides
        model = Model(**options)
        torch.manual_seed(6)
        nn.init.normal_(model.before.weight, std=0.3)
        nn.init.zeros_(model.before.bias)
        experts = moe.expert_parameters(model)
        assert len(experts) == 4 * EXPERTS // ranks
        names = list(experts)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        parallel = DistributedDataParallel(model)
        inputs, targets = (x.chunk(ranks)[rank] for x in batch())
        y = parallel(inputs)
        assert y.shape == inputs.shape
        loss = functional.mse_loss(y, targets) + moe.auxiliary_loss(model)
        loss.backward()
        statistics = model.mixture.statistics
        assert statistics is not None and int(statistics.counts.sum()) == 2 * inputs.shape[0] * 2
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), **gradients, "dropped": statistics.dropped})
    return results


VARIANTS: list[dict[str, Any]] = [
    {"codec": "none", "balance_all_ranks": True, "hierarchical": True},
    {
        "codec": "none",
        "balance_all_ranks": True,
        "capacity_factor": EXPERTS,
        "padded": True,
        "hierarchical": True,
    },
    {"balance_all_ranks": True},
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_gradients_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    alone = run_ranks(step, 1, VARIANTS[:1])[0][0]
    together = run_ranks(step, ranks, VARIANTS)
    for number, options in enumerate(VARIANTS):
        parts = [results[number] for results in together]
        limit = 1e-5 if options.get("codec") == "none" else 0.05
        assert all(int(part["dropped"]) == 0 for part in parts)
        y = torch.cat([part["y"] for part in parts])
        assert float((y - alone["y"]).norm()) <= limit * float(alone["y"].norm())
        for name, expected in alone.items():
            if name in ("y", "dropped"):
                continue
            (holder, *others) = [part for part in parts if name in part]
            assert len(others) == (0 if "experts" in name else ranks - 1)
            error = float((holder[name] - expected).norm())
            assert error <= limit * float(expected.norm()) + 1e-7, (options, name)


def check_layer(rank: int, ranks: int) -> None:
    def expert() -> nn.Module:
        return nn.Linear(16, 8)

    x = torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(rank))
    # With a capacity of one row a rank the rest is dropped, in both forms alike.
    torch.manual_seed(0)
    layer = moe.MoE(16, 4, expert, top_k=1, capacity_factor=4 / 30, codec="none")
    padded = moe.MoE(16, 4, expert, top_k=1, capacity_factor=4 / 30, padded=True, codec="none")
    padded.load_state_dict(layer.state_dict())
    y = layer(x)
    statistics = layer.statistics
    assert y.shape == (3, 10, 8) and torch.equal(padded(x), y)
    kept = int((statistics.counts > 0).sum())
    assert int(statistics.dropped) == int(padded.statistics.dropped) == 30 - kept
    assert int(y.flatten(0, 1).any(1).sum()) == kept
    values = statistics.to_dict()
    assert values["dropped"] == pytest.approx(1 - kept / 30)
    assert values["largest_load"] == pytest.approx(int(statistics.counts.max()) * 4 / 30)
    logits = layer.router(x.flatten(0, 1))
    z = torch.logsumexp(logits, 1).square().mean().item()
    assert values["router_z_loss"] == pytest.approx(z, rel=1e-5)
    auxiliary = 0.01 * values["load_balancing_loss"] + 0.001 * z
    assert layer.auxiliary_loss.item() == pytest.approx(auxiliary, rel=1e-5)
    assert moe.auxiliary_loss(nn.ModuleList([layer, padded])).item() == pytest.approx(2 * auxiliary, rel=1e-5)

    # Names hold the experts' numbers among all ranks, and a copy gives the same result.
    first = 2 * rank
    assert [name for name in layer.state_dict() if "weight" in name] == [
        "router.weight",
        f"experts.{first}.weight",
        f"experts.{first + 1}.weight",
    ]
    assert torch.equal(copy.deepcopy(padded)(x), y)

    # Recomputed activations have the same gradients; autocast computes experts in bf16 and the router in fp32.
    layer = moe.MoE(16, 4, expert)
    plain = torch.autograd.grad(layer(x).sum() + layer.auxiliary_loss, list(layer.parameters()))
    recomputed = checkpoint(layer, x, use_reentrant=False).sum() + layer.auxiliary_loss
    for a, b in zip(plain, torch.autograd.grad(recomputed, list(layer.parameters())), strict=True):
        assert torch.equal(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.statistics.router_z_loss.dtype == torch.float32
    # A rank without tokens takes part, and all its parameters have gradients.
    y = layer(x[:0] if rank else x)
    (y.sum() + layer.auxiliary_loss).backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())

    for options, message in (
        ({"num_experts": 5}, "num_experts: 5 experts are not divisible by the 2 ranks"),
        ({"top_k": 5}, "top_k=5: expected 1 to 4, the number of experts"),
        ({"top_k": 0}, "top_k=0: expected 1 or more"),
        ({"capacity_factor": 0.0}, "capacity_factor: expected a positive number, got 0.0"),
        ({"padded": True}, "padded: needs a capacity_factor"),
        ({"drop_lowest": True}, "drop_lowest: needs a capacity_factor"),
        ({"codec": "sign"}, "codec: sign loses 60%"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.MoE(**{"features": 16, "num_experts": 4, "expert": expert, **options})
    with pytest.raises(TypeError, match="expert: expected a function"):
        moe.MoE(16, 4, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x: expected \[..., 16\], got \(3, 8\)"):
        layer(torch.ones(3, 8))
    dist.barrier()


def test_layer() -> None:
    run_ranks(check_layer, 2)


def compare_compiled(rank: int, ranks: int) -> None:
    variants: list[dict[str, Any]] = [
        {"balance_all_ranks": True},
        {"padded": True, "capacity_factor": 2.0, "hierarchical": True},
    ]
    for options in variants:
        torch.manual_seed(0)
        model = Model(**options)
        inputs = batch()[0].chunk(ranks)[rank]
        results = []
        torch._dynamo.reset()
        for layer in (model, torch.compile(model, backend="aot_eager")):
            for _ in range(2):
                model.zero_grad()
                y = layer(inputs)
                (y.square().mean() + moe.auxiliary_loss(model)).backward()
            statistics = model.mixture.statistics
            assert statistics is not None
            tensors = {"y": y.detach(), "counts": statistics.counts, "z": statistics.router_z_loss}
            results.append(tensors | {name: p.grad for name, p in model.named_parameters()})
        for name, expected in results[0].items():
            torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_compiled_models_have_the_same_results() -> None:
    run_ranks(compare_compiled, 2, fresh=True, timeout=120)
