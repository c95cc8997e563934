"""The torch implementation of the local tasks gives the bits of the CPU kernels; it runs on CPU tensors here."""

from __future__ import annotations

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Exact, RandK, codec
from dtcomm.kernels import local_tasks

SIZES = [0, 1, 31, 4095, 4096, 4097, 20_000]


def floats(numel: int, seed: int, dtype: torch.dtype = torch.float32, bad: bool = True) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=dice) * torch.randint(-40, 40, (numel,), generator=dice).float().exp2()
    if bad and numel > 100:
        x[50], x[numel // 2], x[numel - 1] = torch.nan, torch.inf, 1e-42
    return x.to(dtype)


def equal_with_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["exact", "exact:bits=16", "exact:block=128"])
def test_tasks_of_exact_equal_the_native_ones(spec: str, dtype: torch.dtype) -> None:
    exact = codec(spec)
    assert isinstance(exact, Exact)
    for numel in SIZES:
        for feedback in (False, True):
            x = floats(numel, numel, dtype)
            residuals = [floats(numel, 7, bad=False) if feedback else None for _ in range(2)]
            exponents = [torch.full((exact.blocks(numel),), 9, dtype=torch.uint8) for _ in range(2)]
            integers = [torch.full((numel,), 7, dtype=exact.code_type) for _ in range(2)]
            outs = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
            runs = -(-numel // _C.AUDIT_RUN)
            sums = [torch.zeros(runs, dtype=torch.int64) for _ in range(2)]
            if numel:
                local_tasks.measure_exponents(exact, x, residuals[0], exponents[0])()
                local_tasks.quantize_to_exponents(exact, 3, x, residuals[0], exponents[0], integers[0])()
                local_tasks.dequantize(exact, 3, integers[0], exponents[0], 3, outs[0])()
                local_tasks.audit_checksums(exact, integers[0], sums[0])()
            local_tasks.measure_exponents(exact, x, residuals[1], exponents[1]).reference()
            local_tasks.quantize_to_exponents(
                exact, 3, x, residuals[1], exponents[1], integers[1]
            ).reference()
            local_tasks.dequantize(exact, 3, integers[1], exponents[1], 3, outs[1]).reference()
            local_tasks.audit_checksums(exact, integers[1], sums[1]).reference()
            for native, by_torch in (exponents, integers, sums, outs):
                assert equal_with_nan(native, by_torch), (numel, feedback)
            assert not feedback or equal_with_nan(*residuals)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [32, 1024])
def test_audit_verdicts_equal_the_native_ones(block: int) -> None:
    exact = codec(f"exact:block={block}")
    assert isinstance(exact, Exact)
    numel = 3 * _C.AUDIT_RUN + 5
    for at, in_exponents in ((None, False), (0, False), (2, False), (1, True), (3, True)):
        sums = torch.arange(4)
        actual, exponents = sums.clone(), torch.zeros(exact.blocks(numel), dtype=torch.uint8)
        audited_exponents = exponents.clone()
        if at is not None and in_exponents:
            audited_exponents[at * _C.AUDIT_RUN // block] = 1
        elif at is not None:
            actual[at:] += 1
        verdicts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        local_tasks.audit_verdict(exact, numel, sums, actual, exponents, audited_exponents, verdicts[0])()
        local_tasks.audit_verdict(
            exact, numel, sums, actual, exponents, audited_exponents, verdicts[1]
        ).reference()
        assert torch.equal(*verdicts)
        out = [torch.ones(numel), torch.ones(numel)]
        codes = torch.full((numel,), 5, dtype=exact.code_type)
        local_tasks.dequantize(exact, 2, codes, exponents, 1, out[0], verdicts[0])()
        local_tasks.dequantize(exact, 2, codes, exponents, 1, out[1], verdicts[1]).reference()
        assert torch.equal(*out) and bool((out[0] == 1).all()) == (at is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [0.0001, 0.01, 0.3, 1.0])
def test_tasks_of_shared_positions_equal_the_native_ones(ratio: float, dtype: torch.dtype) -> None:
    randk = codec(f"randk:positions=shared,ratio={ratio}")
    assert isinstance(randk, RandK)
    for numel in SIZES[1:]:
        for feedback in (False, True):
            for key, offset in ((local_tasks.shared_key(numel), 0), (2**64 - 5, 4096 * 7 + 3)):
                x = floats(numel, numel, dtype)
                residuals = [floats(numel, 3, bad=False) if feedback else None for _ in range(2)]
                kept = randk.kept_in(numel)
                values, value_residuals = ([torch.zeros(kept) for _ in range(2)] for _ in range(2))
                outs = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
                local_tasks.gather_values(
                    randk, key, offset, x, residuals[0], values[0], value_residuals[0] if feedback else None
                )()
                local_tasks.gather_values(
                    randk, key, offset, x, residuals[1], values[1], value_residuals[1] if feedback else None
                ).reference()
                local_tasks.scatter_values(randk, key, offset, not feedback, values[0], outs[0])()
                local_tasks.scatter_values(randk, key, offset, not feedback, values[1], outs[1]).reference()
                assert (
                    equal_with_nan(*values) and equal_with_nan(*value_residuals) and equal_with_nan(*outs)
                ), (numel, feedback)
                if residuals[0] is not None and residuals[1] is not None:
                    assert equal_with_nan(residuals[0], residuals[1])
                    local_tasks.restore_residual(randk, key, offset, value_residuals[0] + 1, residuals[0])()
                    local_tasks.restore_residual(
                        randk, key, offset, value_residuals[1] + 1, residuals[1]
                    ).reference()
                    assert equal_with_nan(residuals[0], residuals[1])
