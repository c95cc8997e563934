"""Wrong arguments fail where they are given, and the message names the argument and what is valid."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import context_parallel, ddp, fsdp
from dtcomm.codecs import Codec
from dtcomm.codecs.base import Layout
from dtcomm.errors import CollectiveMismatch, PeerLost
from dtcomm.launch.ranks import run_ranks, spawn_ranks
from dtcomm.local_sgd import LocalSGD
from examples.moe import MoE


class OwnCodec(Codec):
    """A codec that nothing encodes."""

    name = "own"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        return Layout(code_bits=8)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"grad_scaler": 256.0}, TypeError, "grad_scaler: expected a torch.amp.GradScaler, got float"),
    ({"guard": True}, TypeError, "guard: expected a dtcomm.ddp.Guard or None, got bool"),
    ({"seed": "1"}, TypeError, "seed: expected an integer, got '1'"),
    ({"sample_every": "10"}, TypeError, "sample_every: expected an integer, got '10'"),
    ({"warmup": 1.5}, TypeError, "warmup: expected an integer, got 1.5"),
    ({"warmup": -1}, ValueError, "warmup=-1: expected 0 or more"),
    ({"timeline": True}, TypeError, "timeline: expected an integer, got True"),
    ({"candidates": ["int4"]}, ValueError, "codec: candidates goes with 'auto', got '.*int8'"),
    (
        {"codec": "int88"},
        ValueError,
        r"codec: unknown codec or compressor 'int88' \(did you mean 'int8'\?\); valid names: none, ",
    ),
    (
        {"codec": "auto", "candidates": ["int9"]},
        ValueError,
        r"candidates: unknown codec or compressor 'int9'",
    ),
    (
        {"sede": 1},
        TypeError,
        r"'sede' \(did you mean 'seed'\?\); valid: codec, feedback, residual, .*, grad_scaler$",
    ),
    ({"codec": "* => int8"}, ValueError, r"codec: .* written with ->"),
    ({"codec": "int8/int4/int2"}, ValueError, r"codec: 'int8/int4/int2': A/B is .* got 3 levels"),
    ({"codec": None}, TypeError, "codec: expected a spec string or a Codec, got NoneType"),
    ({"codec": "auto", "verify": 5}, ValueError, "verify: 'auto' measures by itself"),
    ({"codec": "dgc", "verify": 5}, ValueError, "verify: dgc"),
    (
        {"codec": "int8:blok=64"},
        ValueError,
        r"int8: unknown option 'blok' \(did you mean 'block'\?\); valid options",
    ),
    (
        {"codec": "ef:int4"},
        ValueError,
        "'ef' is a prefix of dtcomm.fsdp.compress; error feedback is here the argument",
    ),
    ({"codec": "ndim<2 -> none, * -> int8"}, ValueError, "two arrows; rules are separated by semicolons"),
    ({"codec": 8}, TypeError, "expected a spec string or a Codec, got int"),
    (
        {"codec": OwnCodec()},
        TypeError,
        "codec: OwnCodec has no kernels; dtcomm.codecs.custom makes a codec of",
    ),
    ({"feedback": "ef"}, ValueError, "feedback: 'ef'; valid: True, False, 'auto', 'residual', 'ef21'"),
    (
        {"exclude": "haed"},
        ValueError,
        r"exclude: 'haed' matches no parameter and no module \(did you mean 'head'\?\)",
    ),
    ({"residual": "int8"}, ValueError, "residual: 'int8' is for error feedback, which is off"),
    ({"exclude": [3]}, TypeError, "exclude: expected patterns of names, got int"),
]


def messages(rank: int, world_size: int) -> list[str]:
    """Return the error of each mistake; after it the model can be compressed."""
    found = []
    for options, _, _ in MISTAKES:
        model = DistributedDataParallel(torch.nn.ModuleDict({"head": torch.nn.Linear(4, 4)}))
        with pytest.raises((TypeError, ValueError)) as error:
            ddp.compress(model, **options)
        ddp.compress(model, "int8")
        found.append(f"{error.type.__name__}: {error.value}")
    return found


def test_wrong_arguments_are_named_where_they_are_given() -> None:
    for found in run_ranks(messages, 2):
        for text, (_, kind, pattern) in zip(found, MISTAKES, strict=True):
            assert re.match(f"{kind.__name__}: ", text) and re.search(pattern, text), text


def sharded() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    fully_shard(model)
    return model


def replicated() -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(64, 64))


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(4, requires_grad=True)])


def attend(rank: int) -> None:
    context_parallel.attention(*torch.ones(3, 1, 2, 16 + 16 * rank, 8), kv_codec="int8")


def lose_inputs(rank: int) -> None:
    model = replicated()
    ddp.compress(model, "int8")
    for _ in range(4 - rank):
        model(torch.ones(2, 64)).sum().backward()
    if rank:
        os._exit(0)


#: What is called with the rank, the error and what its message contains.
CALLS: list[tuple[Callable[[int], Any], type[Exception], str]] = [
    (lambda _: ddp.hook("int8", None), TypeError, "state: .*got str: model.register_comm_hook"),  # type: ignore[arg-type]
    (lambda _: dtcomm.compress(replicated(), "int8"), TypeError, "call dtcomm.ddp.compress"),  # type: ignore[operator]
    (lambda _: ddp.compress(torch.compile(replicated())), TypeError, "model: .* before torch.compile"),
    (lambda _: ddp.compress(sharded()), TypeError, "model: .* call dtcomm.fsdp.compress"),
    (lambda _: fsdp.compress(replicated()), TypeError, "model: .* call dtcomm.ddp.compress"),
    (lambda _: fsdp.compress(sharded(), "int8/int4/int2"), ValueError, "gradients: .*A/B"),
    (lambda _: ddp.compress(replicated(), "int8").rescale(0), ValueError, "factor: .* got 0"),
    (lambda _: fsdp.compress(sharded(), "int8").rescale(math.nan), ValueError, "factor: .* got nan"),
    (lambda _: fsdp.ShardedOptimizer([], adam()), TypeError, "optimizer: expected a class such as AdamW"),  # type: ignore[arg-type]
    (lambda _: MoE(64, 4, torch.nn.Linear(64, 64)), TypeError, "expert: .* function .* got a Linear"),
    (attend, CollectiveMismatch, "k: all ranks need as many tokens"),
    (lose_inputs, PeerLost, r"model.join\(\)"),
]


def make_calls(rank: int, world_size: int) -> list[str]:
    if rank:
        warnings.simplefilter("ignore")
    found = []
    for call, kind, _ in CALLS:
        with pytest.raises(kind) as error:
            call(rank)
        found.append(str(error.value))
    return found


def test_each_mistake_is_one_clear_error() -> None:
    outcome = spawn_ranks(make_calls, 2).join()[0]
    assert outcome.ok, outcome.traceback
    for text, (_, _, pattern) in zip(outcome.result, CALLS, strict=True):
        assert re.search(pattern, text), text


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embed(x)))
        return out


def excluded_codecs(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the codec of each weight under DDP, and under LocalSGD."""

    def codecs(report: Any) -> dict[str, str]:
        return {name: row.codec for row in report.rows for name in row.names if name.endswith("weight")}

    model = DistributedDataParallel(Net())
    state = ddp.compress(model, "int8", exclude=["head", "emb*.weight"])
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
    local = LocalSGD(Net(), every=1, exclude="*")
    return codecs(state.report()), codecs(local.report())


def test_excluded_parameters_travel_uncompressed() -> None:
    for fixed, local in run_ranks(excluded_codecs, 2):
        assert fixed == {"embed.weight": "none", "body.weight": "int8", "head.weight": "none"}
        assert local == {"embed.weight": "none", "body.weight": "none", "head.weight": "none"}
