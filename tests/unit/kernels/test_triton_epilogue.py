"""The epilogue in Triton without a device: interpreted in a process of its own, and compiled to be inspected.

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

from dtcomm.kernels import use
from dtcomm.kernels.calls import EpilogueCall
from dtcomm.kernels.epilogue import empty_quantized, epilogue_task
from tests.unit.kernels.test_bit_exact import raw

pytest.importorskip("triton", reason="Triton is not installed")
from dtcomm.kernels import triton_epilogue  # noqa: E402

ROOT = Path(__file__).parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets")
def test_interpreted_kernels_pass_their_tests() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-W", "ignore", "-k", "reference", __file__],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert re.search(r"^4 passed", run.stdout, re.MULTILINE), run.stdout[-2000:]


@pytest.mark.skipif(not INTERPRETED, reason="without TRITON_INTERPRET=1 Triton needs a device")
@pytest.mark.parametrize(
    ("rows", "features", "dtype"),
    [(1, 1, torch.float32), (9, 40, torch.bfloat16), (2, 64, torch.float32), (2, 20, torch.float16)],
)
def test_bits_of_the_reference(rows: int, features: int, dtype: torch.dtype) -> None:
    """Bias, residual and norm of sums in fp32, as of decoded payloads, and in the type of the output."""
    generator = torch.Generator().manual_seed(features)
    x, stream, bias, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, features), (rows, features), (features,), (features,))
    )
    x[0, 0] = torch.inf if rows > 2 else 0
    terms: list[dict[str, torch.Tensor]] = [{}, {"bias": bias}, {"bias": bias, "addend": stream}]
    for arguments in terms:
        results = []
        for by_triton in (False, True):
            tensors = []
            for options in ({"norm_out": torch.empty_like(x), "weight": weight}, *quantized(x)):
                sums = x.clone()
                task = epilogue_task(sums, **arguments, **options, eps=1e-5)
                if by_triton:
                    triton_epilogue.run_epilogue(sums.float() if arguments else sums, task.call)
                else:
                    with use("reference"):
                        task()
                tensors += [tensor for tensor in task.tensors if tensor is not None]
            results.append([raw(tensor.view(torch.uint8)) for tensor in tensors])
        assert results[0] == results[1], arguments


def quantized(like: torch.Tensor) -> list[dict[str, Any]]:
    """Return the argument of each kind of quantized norm."""
    groups = {like.shape[-1], 1}
    types = (torch.float8_e4m3fn, torch.int8)
    return [{"quantized": empty_quantized(like, dtype, group)} for dtype in types for group in groups]


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
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The PTX of the kernels that calls would launch, compiled without a cache for a device that is not there."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoDevice(90))
    texts: list[str] = []

    def compile_only(function: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            assert options["enable_fp_fusion"] is False
            texts.append(function.warmup(*arguments, grid=grid, **options).asm["ptx"])

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", compile_only)
    yield texts


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET: nothing is compiled")
def test_compiled_code_keeps_the_numerical_rules(compiled: list[str]) -> None:
    """No product is fused with a sum, no division is approximate, and no subnormal is flushed."""
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    call = EpilogueCall(out=x, bias=x[0], addend=x.clone(), weight=x[0], norm_out=x.clone())
    triton_epilogue.run_epilogue(torch.zeros(x.numel()), call)
    codes, scales = torch.empty(64, 128, dtype=torch.float8_e4m3fn), torch.empty(64, 1)
    triton_epilogue.run_epilogue(x, EpilogueCall(out=x, codes=codes, scales=scales))
    assert len(compiled) == 4  # a norm without a weight, and its quantization
    for text in compiled:
        assert ".visible .entry" in text
        assert not re.search(r"\bfma\b|\.ftz|\.approx|div\.full|\bmad\.\w*\.?f32", text)
    assert "div.rn.f32" in compiled[1] and "sqrt.rn.f32" in compiled[1]
