"""`_cuda`: what it says of a machine, what it refuses, and, on a device, the CPU kernels' bytes."""

from __future__ import annotations

import pytest
import torch

from dtcomm import codecs

_cuda = pytest.importorskip("dtcomm._cuda", reason="_cuda was not built: no nvcc, or DTCOMM_CUDA=0")

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SPECS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:round=stochastic",
    "int8:block=64,scale=fp32,symmetric=false",
    "int8:block=4096,symmetric=false,round=stochastic",
)
SIZES = (1, 2, 31, 32, 33, 1000, 1024, 1025, 4097, 70001)


def test_platform_describes_every_machine() -> None:
    platform = _cuda.platform()
    assert platform["runtime"] >= 11000
    assert bool(platform["devices"]) != bool(platform["error"])
    for index, device in enumerate(platform["devices"]):
        assert device["index"] == index and device["name"] and device["memory"] > 0
        assert device["capability"] >= (5, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": b"short"}, "16 bytes"),
        ({"codec": b"\xff" * 12}, "codec"),
        ({"dtype": 99}, "dtype"),
        ({"dtype": 6}, "fp32, fp16 or bf16"),
        ({"x": 2}, "x: must be aligned to 4"),
        ({"payload": 8}, "payload: must be aligned to 16"),
    ],
)
def test_encode_refuses_before_it_queues(change: dict[str, object], message: str) -> None:
    arguments = {
        "codec": codecs.codec("int8").native(),
        "x": 64,
        "dtype": 0,
        "numel": 8,
        "key": 0,
        "offset": 0,
    }
    arguments |= {"payload": 64, "stream": 0} | change
    with pytest.raises(ValueError, match=message):
        _cuda.encode(**arguments)


def test_decode_refuses_before_it_queues() -> None:
    codec = codecs.codec("int8").native()
    with pytest.raises(ValueError, match="out_dtype"):
        _cuda.decode(codec=codec, payload=64, numel=8, dtype=0, out=64, out_dtype=6, stream=0)
    with pytest.raises(ValueError, match="out: must be aligned to 4"):
        _cuda.decode(codec=codec, payload=64, numel=8, dtype=0, out=66, out_dtype=0, stream=0)


@pytest.mark.skipif(bool(_cuda.platform()["devices"]), reason="there is a device")
def test_without_a_device_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        _cuda.encode(
            codecs.codec("int8").native(), x=64, dtype=0, numel=8, key=0, offset=0, payload=64, stream=0
        )


def _hostile(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary numbers with the awkward ones strewn in: zero blocks, huge, tiny and subnormal, NaN, Inf."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    x[::7] *= 1e-30
    x[3::97] = 1e30
    x[5::89] = 1e-42
    x[128:256] = 0.0
    x[300::511] = float("inf")
    x[400::513] = float("nan")
    return x.to(dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use")
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", SPECS)
def test_same_bytes_as_the_cpu(spec: str, dtype: torch.dtype, numel: int) -> None:
    from dtcomm.kernels import ops

    codec = codecs.codec(spec)
    x = _hostile(numel, dtype)
    offset = 2**32 - 100  # the counter's high half changes inside the tensor
    expected = ops.encode(codec, x, key=1234567, offset=offset)
    stream = torch.cuda.current_stream().cuda_stream
    device_x = x.cuda()
    payload = torch.full_like(expected, 0xAA, device="cuda")
    number = FLOATS[dtype]
    _cuda.encode(
        codec.native(), device_x.data_ptr(), number, numel, 1234567, offset, payload.data_ptr(), stream
    )
    assert torch.equal(payload.cpu(), expected)
    for out_dtype, out_number in FLOATS.items():
        if spec == "none" and out_dtype != dtype:
            continue
        out = torch.empty(numel, dtype=out_dtype, device="cuda")
        _cuda.decode(codec.native(), payload.data_ptr(), numel, number, out.data_ptr(), out_number, stream)
        wanted = ops.decode(codec, expected, numel, dtype=out_dtype)
        assert torch.equal(out.cpu().view(torch.uint8), wanted.view(torch.uint8))
