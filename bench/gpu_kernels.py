"""Compare the CUDA kernels with a device copy of the bytes they must move.

python -m bench.gpu_kernels [--mib 64 1024] [--json PATH] [--codecs int8 int4 …] [--seconds 120]

`rate` is the bytes read and written over the median of device-timed runs; `of copy` is its ratio to a copy of 1 GiB
that is timed alternately. Several sets of buffers are used in turn, so that no run finds its input in the cache.
Results are written after each codec, so a run that is cut off keeps what it has.
Installed peers (bitsandbytes, torchao, Transformer Engine) quantize the same input with the most similar blocks, and
`torch.topk` selects from it, without writing a payload.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.common import report
from bench.common.budget import Budget
from dtcomm.codecs import codec
from dtcomm.measure import device as device_info
from dtcomm.measure.device import make_clock, median_seconds
from dtcomm.measure.memory_floor import KernelWorkload, KernelWorkloads, TimedCopy, buffer_sets_for

FIRST_TIER = (
    "fp16",
    "bf16",
    "int8",
    "int8:block=128",
    "int4",
    "int4:block=128",
    "fp8_e4m3:block=32",
    "fp8_e4m3",
    "fp8_e3m4:block=32",
    "fp8_e3m4",
)
OTHERS = (
    "none",
    "int8:round=stochastic",
    "int8:block=64,scale=fp32,symmetric=false",
    "int8:block=4096",
    "int5",
    "int4:rotate=hadamard",
    "int2:spikes=1",
    "fp8_e5m2",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "intv",
    "sign",
    "topk:ratio=0.01",
)
REPEATS = 20
Run = Callable[[int], object]


def peers(numel: int, sets: int, device: torch.device) -> Iterator[tuple[str, int, Run]]:
    """Yield the quantization of `numel` fp32 by other libraries, with the bytes of the most similar codec of dtcomm."""
    x = [torch.randn(numel // 1024, 1024, device=device) for _ in range(sets)]
    kept = max(1, numel // 100)
    yield (
        "torch.topk(x.abs(), 1 %)",
        numel * 4 + codec("topk:ratio=0.01").wire_bytes(numel),
        lambda i: torch.topk(x[i].abs().view(-1), kept),
    )
    try:
        from bitsandbytes import functional as bitsandbytes  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        yield (
            "bitsandbytes quantize_4bit, block 64",
            numel * 4 + numel // 2 + numel // 16,
            lambda i: bitsandbytes.quantize_4bit(x[i], blocksize=64),
        )
    try:
        from torchao.quantization import quant_primitives as torchao  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:

        def affine(i: int) -> None:
            scale, zero = torchao.choose_qparams_affine(
                x[i], torchao.MappingType.SYMMETRIC, (1, 32), torch.int8
            )
            torchao.quantize_affine(x[i], (1, 32), scale, zero, torch.int8)

        yield "torchao int8, block 32", numel * 5 + numel // 8, affine
    try:
        import transformer_engine.pytorch.tensor.mxfp8_tensor as engine  # type: ignore[import-not-found]
        from transformer_engine_torch import DType  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        quantizer = engine.MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
        yield "Transformer Engine mxfp8", numel * 5 + numel // 32, lambda i: quantizer(x[i])


class Measured:
    """The rows of one size, each beside a copy that is timed alternately with it."""

    def __init__(self, numel: int, device: torch.device, copied: int = TimedCopy.LARGE) -> None:
        self.rows: list[dict[str, Any]] = []
        self.numel, self.device = numel, device
        self.sets = buffer_sets_for(self.numel)
        self._clock = make_clock(device)
        self._copy = TimedCopy(device, self._clock, copied)

    def add(self, name: str, workload: KernelWorkload) -> None:
        """Measure a workload and print its row."""
        for warm in range(self.sets):
            workload.run(warm)
        turns = itertools.cycle(range(self.sets))
        self._copy.time(5)
        seconds = median_seconds(
            self._clock, lambda: workload.run(next(turns)), REPEATS, queued_before=self._copy.run
        )
        rate, copy = workload.bytes_moved / seconds, self._copy.bytes_per_second(reset=True)
        self.rows.append(
            {
                "codec": name,
                "verb": workload.name,
                "mib": self.numel / (1 << 18),
                "microseconds": seconds * 1e6,
                "bytes": workload.bytes_moved,
                "gigabytes_per_second": rate / 1e9,
                "copy_gigabytes_per_second": copy / 1e9,
                "of_copy": rate / copy,
            }
        )
        print(
            f"{self.numel / (1 << 18):>5g} MiB  {name:<42} {workload.name:<24} {seconds * 1e6:>8.1f} µs "
            f"{rate / 1e9:>6.0f} GB/s {rate / copy:>5.2f}"
        )


def measure(measured: Measured, specs: list[str], budget: Budget) -> Iterator[str]:
    """Add a row for each codec and workload, and for each installed peer; yields the name of what has been added."""
    mib = f"{measured.numel / (1 << 18):g} MiB"
    for spec in specs:
        if budget.allows(f"{spec}, {mib}"):
            workloads = KernelWorkloads(codec(spec), measured.numel, measured.sets, measured.device)
            for workload in (workloads.encode(), workloads.decode(), *workloads.reductions()):
                measured.add(spec, workload)
            yield spec
    if budget.allows(f"peers, {mib}"):
        for name, moved, run in peers(measured.numel, measured.sets, measured.device):
            measured.add(name, KernelWorkload("encode", moved, lambda i, run=run: run(i) and None))
            yield name


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, nargs="+", default=[64, 1024], help="sizes of the fp32 tensor")
    parser.add_argument(
        "--codecs", nargs="+", default=[*FIRST_TIER, *OTHERS], help="default: all of FIRST_TIER and OTHERS"
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="measurements that no longer fit are skipped and reported"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_kernels: torch sees no CUDA device; --device cpu tries this out", file=sys.stderr)
        return 1
    budget = Budget(options.seconds)
    device, copied = torch.device("cpu"), 1 << 20
    gpu: dict[str, Any] = {"name": "the CPU"}
    if options.device == "cuda":
        device, copied = torch.device("cuda", torch.cuda.current_device()), TimedCopy.LARGE
        gpu = device_info.describe_gpu(device)
    print(f"{gpu['name']}: bytes moved per second, and beside a copy of {copied >> 20} MiB")
    rows: list[dict[str, Any]] = []
    result = {"device": gpu, "versions": device_info.versions(), "rows": rows, "cut": budget.cuts}

    def keep() -> None:
        if options.json:
            report.write(options.json, result)

    for mib in options.mib:
        measured = Measured(int(mib * (1 << 18)), device, copied)
        before = list(rows)
        for _ in measure(measured, options.codecs, budget):
            rows[:] = [*before, *measured.rows]
            keep()
    keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
