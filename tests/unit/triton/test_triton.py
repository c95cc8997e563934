"""The Triton kernels without a device: interpreted in a process of their own, and compiled to be inspected.

Whether Triton interprets is settled when it is first imported, and torch.compile imports it too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dtcomm import codecs
from dtcomm.kernels.calls import Combine, EpilogueCall

triton = pytest.importorskip("triton", reason="Triton is not installed")
from dtcomm.kernels.triton import launch as kernels  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
N = 5000


@pytest.mark.slow
def test_interpreted_kernels_pass_their_tests() -> None:
    """interpreted.py: every codec, verb and option against the reference."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-W", "ignore", HERE / "interpreted.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
    assert re.search(r"^\d\d+ passed in", run.stdout, re.MULTILINE), run.stdout[-2000:]


class NoDevice:
    """A Triton driver that suffices to compile: it has a target and no device."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The PTX of the kernels that calls would launch, compiled without a cache for a device of that capability."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        pytest.skip("TRITON_INTERPRET: nothing is compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDevice(capability))
    texts: list[str] = []

    def compile_only(function: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            assert options["enable_fp_fusion"] is False
            texts.append(function.warmup(*arguments, grid=grid, **options).asm["ptx"])

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", compile_only)
    yield texts


def calls(spec: str, dtype: torch.dtype) -> list[Combine]:
    """Return calls of encode, decode, reduce and reduce_encode, the last one with every argument."""
    codec = codecs.codec(spec)
    payload = torch.zeros(codec.wire_bytes(N) + 16, dtype=torch.uint8)
    payload = payload[-payload.data_ptr() % 16 :][: codec.wire_bytes(N)]
    x, residual = torch.zeros(N, dtype=dtype), torch.zeros(N)
    common: dict[str, Any] = {"codec": codec, "numel": N, "dtype": dtype}
    full = {
        "local": x,
        "residual": residual,
        "payload_out": payload,
        "out": x,
        "key": 2**64 - 1,
        "offset": 2**63,
    }
    return [
        Combine(**common, local=x, payload_out=payload),
        Combine(**common, payloads=(payload,), out=x),
        Combine(**common, payloads=(payload,) * 3, local=x, position=1, divisor=4, out=residual),
        Combine(**common, payloads=(payload,) * 7, position=3, divisor=8, **full),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "dtype", "capability"),
    [
        ("int8", torch.float32, 80),
        ("int4:symmetric=false,round=stochastic", torch.bfloat16, 90),
        ("fp8_e4m3:round=stochastic", torch.float16, 90),
        ("bf16", torch.bfloat16, 90),
        ("int8:block=4096,scale=fp32", torch.float32, 90),
    ],
)
def test_compiled_code_keeps_the_numerical_rules(
    spec: str, dtype: torch.dtype, capability: int, compiled: list[str]
) -> None:
    """No product is fused with a sum, no division is approximate, no subnormal is flushed, and memory is
    read or written 16 bytes at a time."""
    for call in calls(spec, dtype):
        kernels.combine(call)
    assert len(compiled) == 4
    for text in compiled:
        assert ".visible .entry" in text
        assert not re.search(r"\bfma\b|\.ftz|\.approx|div\.full|\bmad\.\w*\.?f32", text)
        assert re.search(r"\b(ld|st)\.global\S*\.v4\.b32", text)
    assert "div.rn.f32" in compiled[2] and "div.rn.f32" in compiled[3]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90])
def test_compiled_epilogue_keeps_the_numerical_rules(capability: int, compiled: list[str]) -> None:
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    call = EpilogueCall(out=x, bias=x[0], addend=x.clone(), weight=x[0], norm_out=x.clone())
    kernels.run_epilogue(torch.zeros(x.numel()), call)
    codes, scales = torch.empty(64, 128, dtype=torch.float8_e4m3fn), torch.empty(64, 1)
    kernels.run_epilogue(x, EpilogueCall(out=x, codes=codes, scales=scales))
    assert len(compiled) == 4  # a norm without a weight, and its quantization
    for text in compiled:
        assert not re.search(r"\bfma\b|\.ftz|\.approx|div\.full|\bmad\.\w*\.?f32", text)
    assert "div.rn.f32" in compiled[1] and "sqrt.rn.f32" in compiled[1]
