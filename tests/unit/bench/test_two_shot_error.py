"""The comparison with flashinfer's error table: its definitions give the published numbers, and fp8_e4m3 beats them."""

from __future__ import annotations

import pytest
import torch

from bench import two_shot_error
from bench.pages import kept


def test_the_definitions_give_the_published_errors() -> None:
    result = two_shot_error.measure(["fp8_e4m3"], numel=1 << 16)
    repeated, ours = (row["errors"] for row in result["rows"])
    for name, published in two_shot_error.PUBLISHED.items():
        assert repeated[name]["mean_relative_percent"] == pytest.approx(published, rel=0.06), name
        assert ours[name]["mean_relative_percent"] < published, name
        assert ours[name]["vnmse"] < repeated[name]["vnmse"], name


def test_the_engine_and_the_kernels_give_one_sum() -> None:
    """A sum without errors is the same on both paths, so the rows differ only in what is encoded."""
    tensors = [torch.full((4096,), float(rank)).bfloat16() for rank in range(two_shot_error.RANKS)]
    codec = two_shot_error.parse("bf16")
    expected = torch.full((4096,), 28.0).bfloat16()
    assert torch.equal(two_shot_error.all_reduce(codec, tensors), expected)
    assert torch.equal(two_shot_error.encode_everything(codec, tensors), expected)
    assert two_shot_error.errors(expected, tensors) == {"mean_relative_percent": 0.0, "vnmse": 0.0}


def test_the_kept_table_has_every_codec() -> None:
    rows = [row["scheme"] for row in kept("two_shot_error")["rows"]]
    assert rows == [two_shot_error.REPEATED_NAME, *two_shot_error.SPECS]
