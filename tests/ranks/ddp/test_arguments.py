"""Wrong arguments fail where they are given, and the message names the argument and what is valid."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.codecs import Codec
from dtcomm.codecs.base import Layout
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD


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
    ({"candidates": ["int4"]}, ValueError, "spec: candidates goes with 'auto', got '.*int8'"),
    (
        {"spec": "int88"},
        ValueError,
        r"spec: unknown codec or compressor 'int88' \(did you mean 'int8'\?\); valid names: none, ",
    ),
    ({"spec": "fp8"}, ValueError, r"unknown codec or compressor 'fp8' \(did you mean 'fp8_e4m3'\?\)"),
    (
        {"spec": "powersdg:rank=4"},
        ValueError,
        r"unknown codec or compressor 'powersdg' \(did you mean 'powersgd:rank=4'\?\); .*, powersgd, dgc",
    ),
    ({"spec": "INT4:block=64"}, ValueError, r"did you mean 'int4:block=64'\?"),
    (
        {"spec": "int8:blok=64"},
        ValueError,
        r"int8: unknown option 'blok' \(did you mean 'block'\?\); valid options",
    ),
    (
        {"spec": "ef:int4"},
        ValueError,
        "'ef' is a prefix of dtcomm.fsdp.compress; error feedback is here the argument",
    ),
    ({"spec": "ndim<2 -> none, * -> int8"}, ValueError, "two arrows; rules are separated by semicolons"),
    ({"spec": 8}, TypeError, "expected a spec string or a Codec, got int"),
    (
        {"spec": OwnCodec()},
        TypeError,
        "codec: OwnCodec has no kernels; dtcomm.codecs.custom makes a codec of",
    ),
    ({"feedback": "ef"}, ValueError, "feedback: 'ef'; valid: True, False, 'residual', 'ef21', 'diana'"),
    (
        {"exclude": "haed"},
        ValueError,
        r"exclude: 'haed' matches no parameter and no module \(did you mean 'head'\?\)",
    ),
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


def register_a_spec(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError) as error:
        ddp.hook("int8", None)  # type: ignore[arg-type]
    del model
    return str(error.value)


def test_the_hook_names_the_state_that_it_wants() -> None:
    for text in run_ranks(register_a_spec, 2):
        assert text.startswith(
            "state: expected a dtcomm.ddp.State, got str: model.register_comm_hook(dtcomm.ddp.State("
        )


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
