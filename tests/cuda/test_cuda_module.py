"""`_cuda`: its report of the machine, and the arguments that it refuses before it queues a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm import codecs
from dtcomm.kernels.calls import Combine

_cuda = pytest.importorskip("dtcomm._cuda", reason="_cuda was not built: no nvcc, or DTCOMM_CUDA=0")


def combine(**change: Any) -> None:
    """Call `_cuda.combine` with valid arguments except `change`; the addresses are fake."""
    right: dict[str, Any] = dict.fromkeys(
        "table position local_dtype residual_in residual_out op key offset out dtype out_dtype stream".split(),
        0,
    )
    right |= {"codec": codecs.codec("int8").native(), "payloads": [64], "local": 64, "numel": 8, "divisor": 1}
    _cuda.combine(**(right | {"payload_out": 64} | change))


def test_platform_lists_devices_or_an_error() -> None:
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
        ({"codec": b"\xff" * 16}, "codec"),
        ({"dtype": 99}, "dtype: unknown"),
        ({"dtype": 6}, "dtype: must be fp32, fp16 or bf16"),
        ({"local_dtype": 6}, "local_dtype: must be fp32, fp16 or bf16"),
        ({"out_dtype": 3}, "out_dtype: must be fp32, fp16 or bf16"),
        ({"position": 2}, "position"),
        ({"position": -1}, "position"),
        ({"divisor": 0}, "divisor"),
        ({"op": 3}, "op: unknown"),
        ({"op": 1}, "op: min and max"),
        ({"payloads": [], "local": 0}, "nothing to combine"),
        ({"payloads": [64] * 17}, "table: more than 16"),
        ({"payloads": [64, 72]}, "payloads: must be aligned to 16"),
        ({"local": 66}, "local: must be aligned to 4"),
        ({"local": 65, "local_dtype": 1}, "local: must be aligned to 2"),
        ({"residual_in": 66}, "residual_in: must be aligned to 4"),
        ({"residual_out": 66}, "residual_out: must be aligned to 4"),
        ({"payload_out": 8}, "payload_out: must be aligned to 16"),
        ({"out": 66}, "out: must be aligned to 4"),
    ],
)
def test_combine_refuses_wrong_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine(**change)


@pytest.mark.parametrize("change", [{"local_dtype": 0}, {"out_dtype": 0}, {"residual_in": 64}])
def test_combine_refuses_conversion_of_types_summed_as_themselves(change: dict[str, Any]) -> None:
    arguments = {"codec": codecs.codec("none").native(), "dtype": 6, "local_dtype": 6, "out_dtype": 6}
    with pytest.raises(ValueError, match="summed as itself"):
        combine(**(arguments | change))


def test_decode_refuses_wrong_arguments() -> None:
    codec = codecs.codec("int8").native()
    for change, message in (
        ({"out_dtype": 6}, "out_dtype: must be fp32, fp16 or bf16"),
        ({"dtype": 6}, "dtype: must be fp32, fp16 or bf16"),
        ({"payload": 8}, "payload: must be aligned to 16"),
        ({"out": 66}, "out: must be aligned to 4"),
    ):
        right = {"payload": 64, "numel": 8, "dtype": 0, "out": 64, "out_dtype": 0, "stream": 0}
        with pytest.raises(ValueError, match=message):
            _cuda.decode(codec, **(right | change))


def expand(**change: Any) -> None:
    right = {
        "gradient": 64,
        "dtype": 0,
        "residual": 0,
        "rows": 3,
        "columns": 4,
        "rank": 2,
        "left": 64,
        "right": 64,
    }
    _cuda.expand(**(right | {"finite": 0, "stream": 0} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 6}, "dtype: must be fp32, fp16 or bf16"),
        ({"rank": 0}, "rank: must be 1 to 64"),
        ({"rank": 65}, "rank: must be 1 to 64"),
        ({"gradient": 66}, "gradient: must be aligned to 4"),
        ({"gradient": 65, "dtype": 1}, "gradient: must be aligned to 2"),
        ({"residual": 66}, "residual: must be aligned to 4"),
        ({"left": 66}, "left: must be aligned to 4"),
        ({"right": 66}, "right: must be aligned to 4"),
    ],
)
def test_low_rank_calls_refuse_wrong_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(**change)
    with pytest.raises(ValueError, match="vectors: must be aligned to 4"):
        _cuda.orthonormalize([(66, 1, 1, 0)], 0)
    with pytest.raises(ValueError, match="right: must be aligned to 4"):
        _cuda.check_finite([(64, 66, 1, 1, 64)], 0)


def test_empty_calls_queue_nothing() -> None:
    expand(rows=0)
    _cuda.orthonormalize([], 0)
    _cuda.check_finite([], 0)
    combine(numel=0)


def test_tensors_must_be_on_one_device() -> None:
    from dtcomm.kernels import cuda

    x = torch.zeros(8)
    with pytest.raises(ValueError, match="all on one CUDA device, got \\['cpu'\\]"):
        cuda.combine(Combine(codec=codecs.codec("int8"), numel=8, dtype=x.dtype, local=x))
    with pytest.raises(ValueError, match="all on one CUDA device"):
        cuda.decode(codecs.codec("int8"), x.to("meta"), 8, x.dtype, x)
    for call in (
        lambda: cuda.expand(x, None, x, x),
        lambda: cuda.orthonormalize([x], [0]),
        lambda: cuda.factors_finite([x], [x]),
    ):
        with pytest.raises(ValueError, match="all on one CUDA device"):
            call()


@pytest.mark.skipif(bool(_cuda.platform()["devices"]), reason="tests the error without a device")
# A kernel of each kind: host code that calls a device-only function would end the process.
@pytest.mark.parametrize(
    "spec",
    ["none", "fp16", "int8", "int4:block=128", "int8:round=stochastic", "int3:block=4096"]
    + [
        "int4:rotate=hadamard",
        "int2:spikes=1",
        "fp8_e4m3",
        "fp8_e5m2",
        "mxfp8",
        "mxfp4",
        "sign",
        "topk",
        "randk",
    ],
)
def test_calls_without_a_device_raise_the_cuda_error(spec: str) -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        combine(codec=codecs.codec(spec).native())
    with pytest.raises(RuntimeError, match="CUDA"):
        expand(dtype=len(spec) % 3)
    with pytest.raises(RuntimeError, match="CUDA"):
        _cuda.orthonormalize([(64, 1, 1, 0)] * 65, 0)
    with pytest.raises(RuntimeError, match="CUDA"):
        _cuda.check_finite([(64, 64, 1, 1, 64)], 0)
