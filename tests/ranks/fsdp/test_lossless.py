"""Parameters gathered in codec ``lossless``: the bits of uncompressed FSDP in fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dtcomm import fsdp
from tests.ranks.fsdp.models import WIDTH, sharded, train
from tests.support.rank_tests import on_ranks

WIDE = 256


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_fsdp2_has_the_bits_of_uncompressed_parameters(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (n,))
    uncompressed, model = sharded(mesh), sharded(mesh)
    fsdp.compress(uncompressed, gradients="none", parameters="none")
    exact = train(uncompressed, rank)
    state = fsdp.compress(model, gradients="none", parameters="lossless")
    coded = train(model, rank)
    assert all(torch.equal(coded[name], exact[name]) for name in exact)
    assert "lossless" in str(state.report())

    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(2)))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(layers, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    state = fsdp.compress(layers, gradients="none", parameters="lossless")
    layers(torch.randn(4, WIDE)).sum().backward()
    for by_kind in state.report().modules.values():
        traffic = by_kind["parameters"]
        assert traffic.codec == "lossless" and not traffic.reason
        assert traffic.wire_bytes < 0.8 * traffic.plain_bytes, "weights in bf16 have less than 12.8 bits"


@on_ranks(2)
def test_the_sharded_optimizer(rank: int, n: int) -> None:
    results = []
    for parameters in ("none", "lossless", "delta:lossless"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, 3)).bfloat16()
        optimizer = fsdp.ShardedOptimizer(
            model.named_parameters(), torch.optim.AdamW, lr=0.01, gradients="none", parameters=parameters
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, WIDTH, generator=generator).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        assert parameters in str(optimizer.report())
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(results[0], results[2], strict=True))


@on_ranks(2)
def test_gradients_and_levels_are_refused(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (n,))
    for options, words in (
        ({"gradients": "lossless"}, "gradients: 'lossless' cannot be summed"),
        ({"parameters": "lossless/int8"}, "parameters: 'lossless' has one level"),
    ):
        with pytest.raises(ValueError, match=words):
            fsdp.compress(sharded(mesh), **options)
