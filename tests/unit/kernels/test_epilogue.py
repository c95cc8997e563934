"""The epilogue (decode, bias, residual, RMS norm): every kernel gives the bytes of the reference, which are right."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.codecs.spec import CODECS
from dtcomm.kernels import available, ops, use
from dtcomm.kernels.epilogue import Quantized, empty_quantized, epilogue, epilogue_task

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
                    tested, runs, out, bias=bias, addend=residual, weight=weight, eps=1e-5, norm_out=normed
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


@pytest.mark.parametrize("values", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_quantized_norm_is_that_of_the_norm(dtype: torch.dtype, values: torch.dtype) -> None:
    """Every kernel gives the reference's bytes, with and without the norm itself, by calls and by tasks."""
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1] = 0
    x[2, 40], x[3, 95], x[4, 0] = torch.inf, torch.nan, -torch.inf
    x[5, 32:64] = 0
    x[6] *= 1e-3
    x[7, 3] = 100 * x[7].abs().max()
    weight = torch.linspace(-1, 2, 96).to(dtype)
    largest = 127.0 if values == torch.int8 else 448.0
    for group in (96, 32, 3):
        results = {}
        for kernel in ["reference", *KERNELS]:
            out, normed = (torch.empty_like(x) for _ in range(2))
            quantized, alone, by_task = (empty_quantized(x, values, group) for _ in range(3))
            payload = ops.encode("none", x)
            with use(kernel):
                arguments = {"weight": weight, "eps": 1e-5}
                epilogue(
                    "none", [(payload, x.numel())], out, **arguments, norm_out=normed, quantized=quantized
                )
                epilogue("none", [(payload, x.numel())], out, **arguments, quantized=alone)
                epilogue_task(x.clone(), **arguments, quantized=by_task)()
            for other in (alone, by_task):
                assert torch.equal(raw(quantized.values), raw(other.values))
                assert torch.equal(raw(quantized.scales), raw(other.scales))
            results[kernel] = quantized
        reference = results["reference"]
        for kernel, result in results.items():
            assert torch.equal(raw(result.values), raw(reference.values)), (kernel, group)
            assert torch.equal(raw(result.scales), raw(reference.scales)), (kernel, group)
        groups = normed.float().view(9, -1, group)
        finite = groups.isfinite().all(-1)
        scales = groups.abs().amax(-1) / largest
        assert torch.equal(reference.scales[finite], scales[finite])
        assert reference.scales[~finite].isnan().all() and not finite.all()
        # The error of an element is half a step of its type.
        error = (reference.dequantize().view(9, -1, group) - groups)[finite].abs()
        step = torch.full_like(error, 0.5) * scales[finite][:, None]
        if values != torch.int8:
            step = torch.maximum(groups[finite].abs() * 2**-4, scales[finite][:, None] * 2**-10)
        assert (error <= step * (1 + 1e-5)).all()
        assert not reference.dequantize()[1].any()  # a row of zeros
        empty = empty_quantized(x[:0], values, group)
        epilogue("none", [], x[:0].clone(), quantized=empty)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def test_values_are_those_of_torch() -> None:
    """The codes are those of torch's own cast to float8_e4m3fn."""
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(2))
    normed, quantized = torch.empty_like(x), empty_quantized(x, group=128)
    epilogue(
        "none",
        [(ops.encode("none", x), x.numel())],
        torch.empty_like(x),
        norm_out=normed,
        quantized=quantized,
    )
    expected = (normed / quantized.scales).to(torch.float8_e4m3fn)
    assert torch.equal(raw(quantized.values), raw(expected))


def test_the_residual_may_be_the_result() -> None:
    x, stream = torch.randn(4, 64), torch.randn(4, 64)
    payload = ops.encode("int8", x)
    expected = epilogue("int8", [(payload, 256)], torch.empty(4, 64), addend=stream)
    assert torch.equal(epilogue("int8", [(payload, 256)], stream, addend=stream), expected)


def test_errors_name_the_wrong_argument() -> None:
    payload = ops.encode("int8", torch.zeros(64))
    with pytest.raises(ValueError, match=r"runs: hold 64 elements, out \(3, 64\) has 192"):
        epilogue("int8", [(payload, 64)], torch.empty(3, 64))
    with pytest.raises(ValueError, match="bias: expected 64 elements"):
        epilogue("int8", [(payload, 64)], torch.empty(1, 64), bias=torch.zeros(3))
    with pytest.raises(ValueError, match="weight: needs norm_out or quantized"):
        epilogue("int8", [(payload, 64)], torch.empty(1, 64), weight=torch.zeros(64))
    values, scales = torch.empty(1, 64, dtype=torch.int8), torch.empty(1, 1)
    for wrong_values, wrong_scales, error, message in (
        (values.float(), scales, TypeError, "quantized.values: expected float8_e4m3fn, int8"),
        (values[:, :32], scales, ValueError, "quantized.values: expected"),
        (values, torch.empty(1, 3), ValueError, "quantized.scales: 3 scales for a row do not divide its 64"),
        (values, torch.empty(2, 1), ValueError, "quantized.scales: expected 1 elements, got 2"),
        (values, scales.double(), TypeError, "quantized.scales: expected"),
    ):
        wrong = Quantized(values=wrong_values, scales=wrong_scales)
        with pytest.raises(error, match=message):
            epilogue("int8", [(payload, 64)], torch.empty(1, 64), quantized=wrong)
    with pytest.raises(ValueError, match=r"dtype: expected float8_e4m3fn or int8, got torch\.uint8"):
        empty_quantized(scales, torch.uint8)
    with pytest.raises(ValueError, match="group: 5 does not divide the 64 features"):
        empty_quantized(values, group=5)
