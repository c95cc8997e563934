"""FSDP2 with torchtitan's settings, as the guide on frameworks compresses it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtcomm import fsdp
from tests.support.rank_tests import on_ranks


@on_ranks(2)
def test_the_settings_of_torchtitan(rank: int, n: int) -> None:
    """Do what torchtitan's `apply_fsdp_to_decoder` does, and then what the guide says."""
    block, norm, head = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
    with torch.device("meta"):
        model = nn.Sequential(block, norm, head).to("meta")
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=precision)
    fully_shard([model[1], model[2]], mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    state = fsdp.compress(model, gradients="int8", parameters="fp8_e4m3")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    model(torch.ones(4, 64)).sum().backward()
    bias = model[2].bias.grad.full_tensor()
    torch.testing.assert_close(bias, torch.full((64,), 4.0 * n), rtol=0.01, atol=0)  # a sum, not a mean
    assert {kind.codec for kind in state.report().modules["2"].values()} == {"int8", "fp8_e4m3"}
