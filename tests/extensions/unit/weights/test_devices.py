"""Weights on a device: CPU tensors that pass for CUDA tensors take the same copies and pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dtcomm.extensions.weights import Part, Resharded, Weights, codec, diff
from tests.support.fake_cuda_tensor import (
    FakeCudaTensor,
    fake_cuda_device,
    host_copy,
    to_fake_cuda,
    unchecked,
)
from tests.support.stream_checker import RecordedStreams


class _Unpinned(TorchFunctionMode):
    """Allocates pageable memory where pinned memory is asked for, and counts how often it is."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self.count += bool(kwargs.pop("pin_memory", False))
        return func(*args, **kwargs)


@pytest.fixture
def pinned() -> Iterator[_Unpinned]:
    with fake_cuda_device(RecordedStreams()), unchecked(), _Unpinned() as mode:
        yield mode


def changed(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(numel, generator=generator).bfloat16()
    return old, torch.where(torch.rand(numel, generator=generator) < 0.03, old * 1.01, old)


@pytest.mark.parametrize("numel", [0, 1, 1_300_000])
def test_the_codec_gives_the_bytes_of_the_cpu_in_pieces(
    numel: int, pinned: _Unpinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_PIECES_AT_ONCE", 1)
    old, new = changed(numel)
    payload, count = codec.encode(to_fake_cuda(old), to_fake_cuda(new))
    alone, expected = codec.encode(old, new)
    assert torch.equal(payload, alone) and count == expected
    out = to_fake_cuda(torch.zeros_like(old))
    codec.decode(to_fake_cuda(old), payload, out)
    assert torch.equal(host_copy(out), new)
    assert (pinned.count > 0) == (numel > 0)


@pytest.mark.parametrize("buffers", [1, 2])
def test_patches_of_device_tensors_and_engines_on_a_device(buffers: int, pinned: _Unpinned) -> None:
    old, new = changed(5000)
    whole = diff(None, {"w": to_fake_cuda(old.view(50, 100))}, version=0)
    patch = diff(
        {"w": to_fake_cuda(old.view(50, 100))}, {"w": to_fake_cuda(new.view(50, 100))}, base=0, version=1
    )
    assert patch == diff({"w": old.view(50, 100)}, {"w": new.view(50, 100)}, base=0, version=1)
    held, part = to_fake_cuda(torch.zeros(50, 100).bfloat16()), to_fake_cuda(torch.zeros(100, 25).bfloat16())
    layout = {"part": (Part("w", dim=1, transposed=True),)}
    meta = {"w": torch.empty(50, 100, dtype=torch.bfloat16, device="meta")}
    followers = [
        Weights({"w": held}, buffers=buffers),
        Resharded(meta, {"part": part}, layout, rank=1, ranks=2, buffers=buffers),
    ]
    for bytes_of, expected in ((whole, old), (patch, new)):
        for follower in followers:
            follower.commit(follower.prepare([bytes_of]))
        assert torch.equal(host_copy(held), expected.view(50, 100))
        assert torch.equal(host_copy(part), expected.view(50, 100).t()[:, 25:])
    assert isinstance(held, FakeCudaTensor) and pinned.count > 0
