"""Bytes that FSDP's collectives send: counted, predicted, and the required reductions."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dtcomm import algorithms, fsdp
from dtcomm.codecs import Codec, Exact, codec
from dtcomm.codecs.spec import CODECS
from dtcomm.launch.ranks import run_ranks

WIDTH = 256
NUMEL = WIDTH * WIDTH + WIDTH  # elements of a layer: on two ranks no padding is needed
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = list(CODECS)
# The minimal reduction of bytes.
GATHER = {"int8": 1.88, "int4": 3.5}  # of bf16
SCATTER = {"int8": 3.7, "int4": 7.0}  # of fp32


def predicted(collective: str, ranks: int, spec: str, dtype: torch.dtype) -> int:
    """Return the predicted bytes of one call on every rank; two ranks send the same with every algorithm."""

    def alike(collective: str, numel: int, sent: Codec, dtype: torch.dtype) -> int:
        schedule = algorithms.build("one_shot", collective, ranks)
        (found,) = set(schedule.bytes_on_wire(numel, sent, dtype))
        return found

    chosen = codec(spec)
    if isinstance(chosen, Exact) and collective == "reduce_scatter":
        # The ranks agree on every block's exponent before they add integers.
        blocks = chosen.blocks(NUMEL // ranks) * ranks
        agreement = alike("all_reduce", blocks, codec("none"), torch.uint8)
        return agreement + alike(collective, NUMEL, codec("none"), chosen.code_type)
    return alike(collective, NUMEL, chosen, dtype)


def bytes_sent(rank: int, ranks: int, hosts: int) -> dict[tuple[str, torch.dtype], tuple[int, ...]]:
    """Return wire and plain bytes of a gather, then of a reduce-scatter, by codec and dtype."""
    if hosts > 1:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank * hosts // ranks}"
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for dtype in DTYPES:
        for spec in SPECS:
            torch.manual_seed(0)
            layer = nn.Linear(WIDTH, WIDTH)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            state = fsdp.compress(layer, spec, spec)
            layer(torch.ones(2, WIDTH)).float().square().mean().backward()
            kinds = state.report().modules[""]
            assert not any(traffic.uncompressed_reason for traffic in kinds.values()), (spec, dtype, kinds)
            figures: list[int] = []
            for traffic in (kinds["parameters"], kinds["gradients"]):
                assert traffic.calls == 1
                figures += [traffic.wire_bytes, traffic.plain_bytes]
            found[spec, dtype] = tuple(figures)
    return found


@pytest.mark.parametrize("hosts", [1, 2])
def test_sent_bytes_are_the_predicted_ones(hosts: int) -> None:
    ranks = 2
    for found in run_ranks(bytes_sent, ranks, hosts):
        for (spec, dtype), (gathered, whole, scattered, gradients) in found.items():
            assert whole == gradients == NUMEL * dtype.itemsize // ranks
            assert gathered == predicted("all_gather", ranks, spec, dtype), (spec, dtype)
            assert scattered == predicted("reduce_scatter", ranks, spec, dtype), (spec, dtype)
        for spec, least in GATHER.items():
            gathered, whole, *_ = found[spec, torch.bfloat16]
            assert whole >= least * gathered, (spec, whole / gathered)
        for spec, least in SCATTER.items():
            *_, scattered, whole = found[spec, torch.float32]
            assert whole >= least * scattered, (spec, whole / scattered)
