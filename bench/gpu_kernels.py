"""The CUDA kernels beside a device copy of the same input: python -m bench.gpu_kernels [--mib 256] [--json PATH].

GB/s of fp32 input, medians of device-timed runs over several input sets, so that no run finds its input cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from dtcomm import codecs

SPECS = ("none", "fp16", "bf16", "int8", "int8:block=64,scale=fp32,symmetric=false")
SETS = 4
FP32 = 0  # csrc/core/types.h


def median_seconds(run: Callable[[int], None], repeats: int = 30) -> float:
    """Of ``run(set)`` on the current stream, between device events."""
    for warm in range(SETS):
        run(warm)
    times = []
    for repeat in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(repeat % SETS)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(mib: int) -> dict[str, float]:
    """Name → GB/s of fp32 input; ``copy`` is the device copying that input."""
    from dtcomm import _cuda

    numel = mib << 18
    inputs = [torch.randn(numel, device="cuda") for _ in range(SETS)]
    outputs = [torch.empty_like(x) for x in inputs]
    stream = torch.cuda.current_stream().cuda_stream
    gigabytes = numel * 4 / 1e9
    rates = {"copy": gigabytes / median_seconds(lambda i: outputs[i].copy_(inputs[i]))}
    for spec in SPECS:
        codec = codecs.codec(spec)
        native = codec.native()
        payloads = [
            torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda") for _ in range(SETS)
        ]

        def encode(i: int, native: bytes = native, payloads: list[torch.Tensor] = payloads) -> None:
            x, payload = inputs[i].data_ptr(), payloads[i].data_ptr()
            _cuda.encode(native, x, FP32, numel, key=0, offset=0, payload=payload, stream=stream)

        def decode(i: int, native: bytes = native, payloads: list[torch.Tensor] = payloads) -> None:
            payload, out = payloads[i].data_ptr(), outputs[i].data_ptr()
            _cuda.decode(native, payload, numel, FP32, out, out_dtype=FP32, stream=stream)

        rates[f"encode {spec}"] = gigabytes / median_seconds(encode)
        rates[f"decode {spec}"] = gigabytes / median_seconds(decode)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the fp32 input")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu_kernels: torch sees no CUDA device", file=sys.stderr)
        return 1
    rates = measure(options.mib)
    device = torch.cuda.get_device_name()
    print(f"{options.mib} MiB of fp32 on {device}")
    print(f"{'':<52} GB/s  of copy")
    for name, rate in rates.items():
        print(f"{name:<50} {rate:>6.0f}  {rate / rates['copy']:>6.2f}x")
    if options.json:
        result = {"device": device, "mib": options.mib, "gigabytes_per_second": rates}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
