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
GATHER_REDUCTION = {"int8": 1.88, "int4": 3.5}  # of bf16
SCATTER_REDUCTION = {"int8": 3.7, "int4": 7.0}  # of fp32


def predicted(collective: str, ranks: int, spec: str, dtype: torch.dtype) -> int:
    """Return the predicted bytes of one call on every rank; two ranks send the same with every algorithm."""

    def bytes_of_every_rank(collective: str, numel: int, payload_codec: Codec, dtype: torch.dtype) -> int:
        schedule = algorithms.build("one_shot", collective, ranks)
        (measured,) = set(schedule.bytes_on_wire(numel, payload_codec, dtype))
        return measured

    parsed = codec(spec)
    if isinstance(parsed, Exact) and collective == "reduce_scatter":
        # The ranks agree on every block's exponent before they add integers.
        blocks = parsed.blocks(NUMEL // ranks) * ranks
        agreement = bytes_of_every_rank("all_reduce", blocks, codec("none"), torch.uint8)
        return agreement + bytes_of_every_rank(collective, NUMEL, codec("none"), parsed.code_type)
    return bytes_of_every_rank(collective, NUMEL, parsed, dtype)


def bytes_sent(rank: int, ranks: int, hosts: int) -> dict[tuple[str, torch.dtype], tuple[int, ...]]:
    """Return wire and plain bytes of a gather, then of a reduce-scatter, by codec and dtype."""
    if hosts > 1:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank * hosts // ranks}"
    mesh = init_device_mesh("cpu", (ranks,))
    measured = {}
    for dtype in DTYPES:
        for spec in SPECS:
            torch.manual_seed(0)
            layer = nn.Linear(WIDTH, WIDTH)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            state = fsdp.compress(layer, spec, spec, allow_inaccurate=True, feedback=False)
            layer(torch.ones(2, WIDTH)).float().square().mean().backward()
            report = state.report()
            assert report.leaving_bytes == (report.wire_bytes if hosts > 1 else 0)
            by_kind = report.modules[""]
            # A cast to a dtype of the same size saves nothing and is left out.
            left_out = spec in ("fp16", "bf16") and dtype.itemsize == 2
            for traffic in by_kind.values():
                assert bool(traffic.reason) == left_out, (spec, dtype, by_kind)
            counts: list[int] = []
            for traffic in (by_kind["parameters"], by_kind["gradients"]):
                assert traffic.calls == 1
                counts += [traffic.wire_bytes, traffic.plain_bytes]
            measured[spec, dtype] = tuple(counts)
    return measured


@pytest.mark.parametrize("hosts", [1, 2])
def test_sent_bytes_are_the_predicted_ones(hosts: int) -> None:
    ranks = 2
    for measured in run_ranks(bytes_sent, ranks, hosts):
        for (spec, dtype), (gathered, plain, scattered, gradients) in measured.items():
            assert plain == gradients == NUMEL * dtype.itemsize // ranks
            assert gathered == predicted("all_gather", ranks, spec, dtype), (spec, dtype)
            assert scattered == predicted("reduce_scatter", ranks, spec, dtype), (spec, dtype)
        for spec, factor in GATHER_REDUCTION.items():
            gathered, plain, *_ = measured[spec, torch.bfloat16]
            assert plain >= factor * gathered, (spec, plain / gathered)
        for spec, factor in SCATTER_REDUCTION.items():
            *_, scattered, plain = measured[spec, torch.float32]
            assert plain >= factor * scattered, (spec, plain / scattered)
