"""Trainers of n shards, engines of m ranks: what each rank holds equals the whole model, sliced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtcomm.extensions.weights import Publisher, Slice, Subscriber, apply, diff
from dtcomm.extensions.weights.patch import Patch
from dtcomm.extensions.weights.reshard import Part, Resharded, plan, published_tensors

LAYOUT = {
    "embed": (Part("tokens", padded=24),),
    "head": (Part("tokens", padded=24),),  # tied in the trainer
    "qkv": (Part("q"), Part("k", copies=2), Part("v", copies=2)),
    "gate_up": (Part("gate_up", span=(0, 24)), Part("gate_up", span=(24, 48))),
    "down": (Part("down", dim=1),),
    "out": (Part("out", dim=1, transposed=True),),
}


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"tokens": (19, 8), "q": (16, 8), "k": (8, 8), "v": (8, 8), "gate_up": (48, 8), "down": (8, 24),
              "out": (16, 8), "norm": (8,), "scale": (), "unused": (3, 5)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def engine(whole: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The parameters of a rank, cut from the whole model without the code under test."""
    padded = torch.zeros(24, 8, dtype=torch.bfloat16)
    padded[:19] = whole["tokens"]
    copies = min(2, ranks)
    tokens = padded.chunk(ranks)[rank].clone()
    q = whole["q"].chunk(ranks)[rank]
    k, v = (whole[name].chunk(ranks // copies)[rank // copies] for name in ("k", "v"))
    gate, up = (half.chunk(ranks)[rank] for half in whole["gate_up"].chunk(2))
    return {
        "embed": tokens,
        "head": tokens.clone(),
        "qkv": torch.cat([q, k, v]),
        "gate_up": torch.cat([gate, up]),
        "down": whole["down"].chunk(ranks, 1)[rank].contiguous(),
        "out": whole["out"].t().chunk(ranks, 1)[rank].contiguous(),
        "norm": whole["norm"].clone(),
        "scale": whole["scale"].clone(),
    }


def shards(whole: dict[str, Tensor], count: int, dim: int) -> list[dict[str, Slice]]:
    """The shards of a trainer: dimension 0 or the last one in equal pieces, the last of which are smaller or absent."""
    parts: list[dict[str, Slice]] = [{} for _ in range(count)]
    for name, tensor in whole.items():
        axis = 0 if dim == 0 or tensor.dim() < 2 else 1
        at = 0
        for part, piece in zip(parts, tensor.chunk(count, axis) if tensor.dim() else (tensor,)):
            offset = tuple(at if each == axis else 0 for each in range(tensor.dim()))
            part[name] = Slice(piece.contiguous(), tuple(tensor.shape), offset)
            at += piece.shape[axis] if tensor.dim() else 0
    return parts


def layout_of(ranks: int) -> dict[str, tuple[Part, ...]]:
    copies = min(2, ranks)
    return {**LAYOUT, "qkv": (Part("q"), Part("k", copies=copies), Part("v", copies=copies))}


@settings(max_examples=60, deadline=None)
@given(
    trainers=st.integers(1, 8),
    ranks=st.sampled_from([1, 2, 4, 8]),
    dim=st.integers(0, 1),
    buffers=st.integers(1, 2),
)
def test_each_rank_equals_the_whole_model_sliced(trainers: int, ranks: int, dim: int, buffers: int) -> None:
    old, new = model(0), model(1)
    new["down"], new["norm"] = old["down"].clone(), old["norm"].clone()  # these do not change
    first = [diff(None, part, version=0) for part in shards(old, trainers, dim)]
    parts = zip(shards(old, trainers, dim), shards(new, trainers, dim))
    second = [diff(before, after, base=0, version=1) for before, after in parts]
    for rank in range(ranks):
        parameters = {name: torch.zeros_like(each) for name, each in engine(old, rank, ranks).items()}
        weights = Resharded(
            old, parameters, layout_of(ranks), rank=rank, ranks=ranks, skip=["un*"], buffers=buffers
        )
        for patches, whole in ((first, old), (second, new)):
            weights.commit(weights.prepare(patches))
            for name, expected in engine(whole, rank, ranks).items():
                assert torch.equal(parameters[name], expected), name
        assert weights.version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nothing": (Part("q"),)}, r"no parameter 'nothing'"),
        ({"norm": (Part("missing"),)}, r"'norm'.*'missing'.*no tensor of this name is published"),
        ({"qkv": (Part("q"), Part("k"))}, r"'qkv': its parts fill \[0:12\] of dimension 0, of \[24, 8\]"),
        ({"qkv": (Part("q"), Part("k"), Part("v"), Part("q"), Part("q"))}, r"'qkv': its parts fill \[0:32\]"),
        ({"down": (Part("q", dim=1),)}, r"'down'.*\[16, 8\] is published.*\[8, 12\]"),
        ({"gate_up": (Part("gate_up", span=(24, 60)),)}, r"'gate_up'.*\[24:60\] is not inside \[0:48\]"),
        ({"embed": (Part("tokens"),)}, r"'embed'.*19 indices cannot hold 19, or 2 shares"),
        ({"qkv": (Part("q", copies=3),)}, r"copies=3: expected a divisor of ranks=2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(change: dict[str, tuple[Part, ...]], message: str) -> None:
    whole = model(0)
    parameters = engine(whole, 0, 2)
    with pytest.raises(ValueError, match=message):
        plan(whole, parameters, {**LAYOUT, **change}, ranks=2, skip=["unused"])


def test_a_tensor_that_fills_nothing_is_refused() -> None:
    whole = model(0)
    with pytest.raises(ValueError, match=r"'unused' is published, but fills no parameter"):
        plan(whole, engine(whole, 0, 2), layout_of(2), ranks=2)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'w'.*bfloat16.*float32"):
        plan({"w": torch.zeros(2, dtype=torch.bfloat16)}, {"w": torch.zeros(2)})


def test_an_interrupted_copy_is_completed() -> None:
    old, new = {"w": torch.zeros(4, 4)}, {"w": torch.ones(4, 4)}
    parameter = torch.zeros(4, 4)
    weights = Resharded(old, {"w": parameter})
    weights.commit(weights.prepare([diff(None, old, version=0)]))
    prepared = weights.prepare([diff(old, new, base=0, version=1)])
    weights._parameters["w"] = torch.zeros(2, 4)  # too small: the copy raises
    with pytest.raises(RuntimeError):
        weights.commit(prepared)
    assert weights.version is None and weights.interrupted is prepared
    weights._parameters["w"] = parameter
    assert weights.commit(prepared) == 1 and torch.equal(parameter, new["w"])


def test_a_subscriber_follows_in_the_layout_of_the_engine(tmp_path: Path) -> None:
    trainer = model(0)
    publisher = Publisher(trainer, tmp_path)
    publisher.publish()
    tensors = published_tensors(str(tmp_path))
    assert {name: each.shape for name, each in tensors.items()} == {
        name: each.shape for name, each in trainer.items()
    }
    parameters = {name: torch.zeros_like(each) for name, each in engine(trainer, 1, 2).items()}
    weights = Resharded(tensors, parameters, layout_of(2), rank=1, ranks=2, skip=["unused"])
    subscriber = Subscriber(weights, tmp_path)
    for seed in (None, 1, 2):
        if seed is not None:
            for name, tensor in model(seed).items():
                trainer[name].copy_(tensor)
            publisher.publish()
        subscriber.update()
        for name, expected in engine(trainer, 1, 2).items():
            assert torch.equal(parameters[name], expected), name


def test_a_rank_that_holds_nothing_of_a_patch_accepts_it() -> None:
    whole = {"a": torch.ones(2), "b": torch.ones(2)}
    parameters = {"a": torch.zeros(2)}
    weights = Resharded(whole, parameters, skip=["b"])
    patch = diff(None, whole, version=3)
    assert weights.commit(weights.prepare([Patch.read(patch)])) == 3
    assert torch.equal(parameters["a"], whole["a"]) and apply({k: torch.zeros(2) for k in whole}, patch) == 3
