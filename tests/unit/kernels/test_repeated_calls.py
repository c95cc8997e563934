"""Calls of encode and decode with `out` that repeat earlier ones: the same bytes, checks and choice of kernels."""

from __future__ import annotations

import pytest
import torch

import dtcomm
from dtcomm import _C
from dtcomm.kernels import cpu
from dtcomm.kernels.calls import Combine

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no C functions that read tensors (torch 2.10 or newer has)",
)

SPECS = ["int8", "int4:round=stochastic", "fp8_e4m3", "bf16", "none", "sign", "topk:ratio=0.1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_repeated_calls_give_the_same_bytes(spec: str, dtype: torch.dtype) -> None:
    codec = dtcomm.codec(spec)
    for run in range(4):
        x = torch.randn(100, generator=torch.Generator().manual_seed(run)).to(dtype)
        expected = dtcomm.encode(spec, x, key=run, offset=3)
        payload = torch.zeros_like(expected)
        assert dtcomm.encode(spec, x, key=run, offset=3, out=payload) is payload
        assert torch.equal(payload, expected)
        assert torch.equal(dtcomm.encode(codec, x, run, 3, out=payload.zero_()), expected)
        decoded = torch.zeros(100, dtype=dtype)
        assert dtcomm.decode(spec, payload, 100, dtype, out=decoded) is decoded
        assert torch.equal(decoded, dtcomm.decode(codec, payload, 100, dtype))


def test_arguments_are_checked_in_every_call() -> None:
    x, out = torch.randn(100), torch.empty(100)
    payload = dtcomm.encode("int8", x)
    for _ in range(3):
        dtcomm.encode("int8", x, out=payload)
        dtcomm.decode("int8", payload, 100, out=out)
    assert _C.encode_repeated("int8", x, 0, 0, payload)
    assert _C.decode_repeated("int8", payload, 100, torch.float32, out)
    with pytest.raises(ValueError, match="out: 100 elements in codec 'int8' are"):
        dtcomm.encode("int8", x, out=payload[1:])
    with pytest.raises(TypeError, match="out: expected uint8"):
        dtcomm.encode("int8", x, out=payload.view(torch.int8))
    with pytest.raises(ValueError, match="x: expected a contiguous tensor"):
        dtcomm.encode("int8", torch.empty(200)[::2], out=payload)
    assert not _C.encode_repeated("int8", torch._neg_view(x), 0, 0, payload)  # its memory has other values
    with pytest.raises(ValueError, match="key: expected at least 0"):
        dtcomm.encode("int8", x, key=-1, out=payload)
    with pytest.raises(ValueError, match=r"key: expected less than 2\*\*64"):
        dtcomm.encode("int8", x, key=2**64, out=payload)
    with pytest.raises(ValueError, match="out: expected 90 elements"):
        dtcomm.decode("int8", dtcomm.encode("int8", x[:90]), 90, out=out)
    with pytest.raises(TypeError, match="out: expected bfloat16"):
        dtcomm.decode("int8", payload, 100, torch.bfloat16, out=out)
    with pytest.raises(TypeError, match="numel: expected an int"):
        dtcomm.decode("int8", payload, True, out=out)


def test_a_forced_kernel_runs_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100)
    payload = dtcomm.encode("int8", x)
    for _ in range(2):
        dtcomm.encode("int8", x, out=payload)
    kernels: list[str] = []
    combine = cpu.combine

    def spy(kernel: str, call: Combine) -> None:
        kernels.append(kernel)
        combine(kernel, call)

    monkeypatch.setattr(cpu, "combine", spy)
    dtcomm.encode("int8", x, out=payload)
    assert not kernels
    with dtcomm.kernels.use("generic"):
        dtcomm.encode("int8", x, out=payload)
    assert kernels == ["generic"]
    monkeypatch.setenv("DTCOMM_KERNEL", "generic")
    dtcomm.encode("int8", x, out=payload)
    assert kernels == ["generic", "generic"]
    monkeypatch.delenv("DTCOMM_KERNEL")
    dtcomm.encode("int8", x, out=payload)
    assert len(kernels) == 2
