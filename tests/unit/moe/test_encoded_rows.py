"""Rows that are encoded one by one: their bytes, for every codec and for rows shorter and longer than a granule."""

from __future__ import annotations

import pytest
import torch

import dtcomm
from dtcomm.codecs import codec as parse
from dtcomm.codecs.spec import CODECS
from dtcomm.moe.encoded_rows import decode_rows, encode_rows

SPECS = [name for name in CODECS if name not in ("topk", "randk", "exact")]
SPECS += ["int7:rotate=hadamard", "int5:symmetric=false,spikes=1,block=64", "int8:scale=fp32,block=2048"]
SPECS += ["fp8_e4m3:block=16", "mxfp4:rotate=hadamard", "topk:ratio=0.5"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("features", [1024, 64, 1600, 100])
def test_a_row_has_the_bytes_that_it_has_alone(spec: str, features: int) -> None:
    codec = parse(spec)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(9, features, generator=torch.Generator().manual_seed(features)).to(dtype)
        payload = encode_rows(x, codec)
        assert payload.shape == (9, codec.wire_bytes(features, dtype))
        decoded = decode_rows(payload, codec, features, dtype)
        for row, row_payload, row_decoded in zip(x, payload, decoded, strict=True):
            assert torch.equal(row_payload, dtcomm.encode(codec, row))
            assert torch.equal(row_decoded, dtcomm.decode(codec, row_payload.clone(), features, dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_rows_can_be_reordered_and_repeated_as_bytes(spec: str) -> None:
    codec = parse(spec)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    payload = encode_rows(x, codec)
    decoded = decode_rows(payload, codec, 96, torch.float32)
    index = torch.tensor([6, 0, 0, 3])
    assert torch.equal(decode_rows(payload[index], codec, 96, torch.float32), decoded[index])
    leading = decode_rows(payload[index].view(2, 2, -1), codec, 96, torch.float32)
    assert torch.equal(leading, decoded[index].view(2, 2, 96))
    with_zeros = decode_rows(payload, codec, 96, torch.float32, zero_row=True)
    assert torch.equal(with_zeros, torch.cat([decoded, torch.zeros(1, 96)]))
    zeros = encode_rows(torch.zeros(3, 96), codec)
    assert not decode_rows(zeros, codec, 96, torch.float32).any()


def test_no_rows() -> None:
    codec = parse("fp8_e4m3")
    payload = encode_rows(torch.empty(0, 96), codec)
    assert payload.shape == (0, codec.wire_bytes(96))
    assert decode_rows(payload, codec, 96, torch.bfloat16).shape == (0, 96)


def test_stochastic_rounding_draws_new_numbers_at_each_call() -> None:
    codec = parse("int4:round=stochastic")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    first, second, other_rank = encode_rows(x, codec), encode_rows(x, codec), encode_rows(x, codec, rank=1)
    assert not torch.equal(first, second)
    assert not torch.equal(second, other_rank)
