"""The epilogue (decode, bias, residual, RMS norm): every kernel gives the bytes of the reference, which are right."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.codecs.spec import CODECS
from dtcomm.kernels import available, ops, use
from dtcomm.kernels.epilogue import epilogue

CASES = [*CODECS, "int4:rotate=hadamard,block=64", "int3:spikes=1,symmetric=false", "int8:block=2048"]
KERNELS = [name for name in available() if name != "reference"]


@pytest.mark.parametrize("spec", CASES)
def test_every_kernel_gives_the_references_bytes(spec: str) -> None:
    tested = codec(spec)
    for rows, features, dtype in ((7, 96, torch.float32), (3, 1000, torch.bfloat16), (5, 33, torch.float16)):
        if dtype not in tested.dtypes:
            continue
        generator = torch.Generator().manual_seed(features)

        def random(*shape: int, of: torch.dtype = dtype, by: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=by).to(of)

        numel = rows * features
        cut = min(numel, tested.granularity * max(1, numel // tested.granularity // 2))
        x = random(numel)
        runs = [(ops.encode(tested, part), part.numel()) for part in (x[:cut], x[cut:])]
        bias, residual, weight = random(features), random(rows, features), random(features)
        plain = torch.cat([ops.decode(tested, payload, count, dtype) for payload, count in runs]).view(
            rows, features
        )
        results = {}
        for kernel in ["reference", *KERNELS]:
            out, normed = (torch.empty(rows, features, dtype=dtype) for _ in range(2))
            with use(kernel):
                epilogue(
                    tested, runs, out, bias=bias, residual=residual, weight=weight, eps=1e-5, norm_out=normed
                )
                decoded = epilogue(tested, runs, torch.empty_like(out))
            results[kernel] = out, normed, decoded
        for kernel, outputs in results.items():
            for result, expected_result in zip(outputs, results["reference"], strict=True):
                assert torch.equal(result.view(torch.uint8), expected_result.view(torch.uint8)), (
                    kernel,
                    rows,
                    features,
                )
        out, normed, decoded = results["reference"]
        assert torch.equal(decoded, plain)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        expected = plain.float() + bias.float() + residual.float()
        torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance * 4)
        expected = torch.nn.functional.rms_norm(out.float(), (features,), weight.float(), 1e-5)
        torch.testing.assert_close(normed.float(), expected, rtol=tolerance, atol=tolerance * 4)


def test_the_residual_may_be_the_result() -> None:
    x, stream = torch.randn(4, 64), torch.randn(4, 64)
    payload = ops.encode("int8", x)
    expected = epilogue("int8", [(payload, 256)], torch.empty(4, 64), residual=stream)
    assert torch.equal(epilogue("int8", [(payload, 256)], stream, residual=stream), expected)


def test_errors_name_the_wrong_argument() -> None:
    payload = ops.encode("int8", torch.zeros(64))
    with pytest.raises(ValueError, match=r"runs: hold 64 elements, out \(3, 64\) has 192"):
        epilogue("int8", [(payload, 64)], torch.empty(3, 64))
    with pytest.raises(ValueError, match="bias: expected 64 elements"):
        epilogue("int8", [(payload, 64)], torch.empty(1, 64), bias=torch.zeros(3))
    with pytest.raises(ValueError, match="weight: needs norm_out"):
        epilogue("int8", [(payload, 64)], torch.empty(1, 64), weight=torch.zeros(64))
