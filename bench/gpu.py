"""Compare CUDA kernels with a device copy of the bytes they must move, and fused collectives with the memory floor.

python -m bench.gpu [--parts fused kernels] [--ranks 8] [--mib 64 1024] [--codecs SPEC ...] [--seconds 300]
                    [--device emulator] [--repeat 10] [--quick] [--json FILE]

Parts:

  fused      virtual ranks on one GPU share its memory, so the floor of a two-shot all-reduce is the time of a copy for
             the bytes that all ranks read and write; the latency of one-shot in graph replays and launched one by one;
             the sizes of published tables in bf16, beside their times, which are those of 8 GPUs over NVLink
  kernels    the kernels of each codec on fp32; torch.compile and installed peers (bitsandbytes, torchao, Transformer
             Engine) quantize the same input with the most similar blocks, and torch.topk selects from it, without
             writing a payload

"floor" is the share of the memory floor: the bytes moved, over the rate of a copy of 1 GiB that is timed alternately.
Kernels use several sets of buffers in turn, so that no run finds its input in the cache. Cases that no longer fit into
--seconds are skipped and listed. `dtcomm perf --virtual 8` measures other sizes and collectives.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench.common import harness, report
from bench.common.budget import Budget
from bench.common.memory_floor import (
    KernelWorkload,
    KernelWorkloads,
    TimedCopy,
    buffer_sets_for,
    time_calls,
)
from bench.common.published import SIZES, published_line
from bench.common.virtual_ranks import VirtualRanks
from dtcomm import measure as device_info
from dtcomm.codecs import codec
from dtcomm.measure import make_clock

KB, MB = 1 << 10, 1 << 20
PARTS = ("fused", "kernels")
#: The most used codecs come first, so that others are skipped if time runs out.
FUSED = ("int8", "fp8_e4m3", "int4", "none", "fp16", "int8:block=128", "int4:block=128")
KERNELS = (
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
LATENCY = tuple(1 << power for power in range(10, 19))  # bytes
PUBLISHED = tuple(size for size in SIZES if size >= 8 * MB)
FUSED_BYTES = 64 * MB  # of a rank's tensor
REPLAYS = 20


class Case(NamedTuple):
    """What is measured together: a codec at a size. A codec of "" stands for installed peers, or for all."""

    part: str
    what: str  # two_shot, one_shot or kernels
    codec: str
    size: int  # bytes of the tensor
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        size = f" of {report.size_name(self.size)}" if self.size else ""
        return f"{self.what}{size}, {str(self.dtype).removeprefix('torch.')}, {self.codec or 'all'}"


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases of the options, the most valuable first; needs no device."""
    found: list[Case] = []
    specs = options.codecs or (("int8",) if options.quick else None)
    if "fused" in options.parts:
        fused = specs or FUSED
        size = MB // 4 if options.quick else FUSED_BYTES
        latency, published = (LATENCY[:1], ()) if options.quick else (LATENCY, PUBLISHED)
        found += [Case("fused", "two_shot", spec, size) for spec in fused[:3]]
        found += [Case("fused", "one_shot", spec, small) for spec in ("none", "int8") for small in latency]
        for large in published:
            found += [Case("fused", "two_shot", spec, large, torch.bfloat16) for spec in ("fp8_e4m3", "none")]
        found += [Case("fused", "two_shot", spec, size) for spec in fused[3:]]
    if "kernels" in options.parts:
        for mib in options.mib:
            found += [Case("kernels", "kernels", spec, int(mib * MB)) for spec in [*(specs or KERNELS), ""]]
    return found


class Bench:
    """A device, its clock and the copy that everything is compared with.

    Args:
        options: Of the program.
        results: Where rows go.
        budget: The limit of time.
    """

    def __init__(self, options: argparse.Namespace, results: harness.Results, budget: Budget) -> None:
        self.options, self._results, self._budget = options, results, budget
        self.device, copied = torch.device("cpu"), MB
        if options.device == "cuda":
            self.device, copied = torch.device("cuda", torch.cuda.current_device()), TimedCopy.LARGE
        self._clock = make_clock(self.device)
        self._copy = TimedCopy(self.device, self._clock, copied)

    def measure(self, case: Case) -> None:
        """Measure a case and print its rows."""
        rows = {
            "two_shot": self._two_shot,
            "one_shot": self._one_shot,
            "kernels": self._kernels if case.codec else self._peers,
        }[case.what](case)
        base = {"part": case.part, "what": case.what, "codec": case.codec, "bytes": case.size}
        base |= {"dtype": str(case.dtype).removeprefix("torch."), "ranks": self.options.ranks}
        lines = []
        for row in rows:
            self._results.rows.append({**base, **row})
            first, last = row.get("range_us", (row["median_us"],) * 2)
            cells = [f"{row['median_us']:.1f}", f"{first:.1f} to {last:.1f}"]
            lines.append([row["name"], *cells, row.get("gb_per_s", ""), row.get("floor", "")])
        note = published_line(case.size) if case.what in ("one_shot", "two_shot") else ""
        report.table(
            f"{case}{': ' if note else ''}{note}", ["", "median us", "range", "GB/s", "floor"], lines
        )
        self._results.write()

    def _rows(self, name: str, moved: int, run: Callable[[], object]) -> dict[str, Any]:
        """Return the row of a call that moves so many bytes; the copy is timed before each."""
        times, shares = [], []
        for _ in range(self.options.repeat):
            self._copy.time()
            times.append(time_calls(self._clock, run, queued_before=self._copy.run))
            shares.append(moved / self._copy.bytes_per_second(reset=True) / max(times[-1], 1e-12))
        timing, share = harness.Timing.of(times), harness.Timing.of(shares)
        fields = {"moved": moved, "gb_per_s": round(moved / max(timing.median, 1e-12) / 1e9, 1)}
        fields |= {
            "floor": round(share.median, 3),
            "floor_range": [round(share.best, 3), round(share.worst, 3)],
        }
        return {"name": name, **timing.as_dict(), **fields}

    def _plan(self, case: Case) -> tuple[VirtualRanks, int, Callable[[], object]]:
        numel, ranks = case.size // case.dtype.itemsize, self.options.ranks
        virtual = VirtualRanks(ranks, self.device)
        xs = [torch.randn(numel, device=self.device).to(case.dtype) for _ in range(ranks)]
        outs = [torch.empty_like(x) for x in xs]
        plan = virtual.plan("all_reduce", numel, case.dtype, case.codec, algorithm=case.what)
        return virtual, numel, functools.partial(virtual.run, plan, xs, outs)

    def _two_shot(self, case: Case) -> list[dict[str, Any]]:
        virtual, numel, run = self._plan(case)
        for _ in range(2):
            run()
        virtual.check()
        wire, ranks = codec(case.codec).wire_bytes(numel, case.dtype), self.options.ranks
        # Of each rank: its tensor is read and written; the other ranks' chunk payloads are written and read, then the
        # sum's: written to all and read by all.
        chunks, sums = 4 * ((ranks - 1) * wire // ranks), 2 * (wire // ranks)
        row = self._rows(f"{ranks} ranks", ranks * (2 * numel * case.dtype.itemsize + chunks + sums), run)
        virtual.check()
        return [row]

    def _one_shot(self, case: Case) -> list[dict[str, Any]]:
        virtual, _, run = self._plan(case)
        replay = self._clock.graph(run, REPLAYS)
        rows = []
        for name, call, calls in (("replayed", replay, REPLAYS), ("launched", run, 1)):
            times = [time_calls(self._clock, call, calls) for _ in range(self.options.repeat)]
            rows.append({"name": name, **harness.Timing.of(times).as_dict()})
        virtual.check()
        return rows

    def _kernels(self, case: Case) -> list[dict[str, Any]]:
        numel = case.size // 4
        sets = buffer_sets_for(numel)
        workloads = KernelWorkloads(codec(case.codec), numel, sets, self.device)
        verbs = (workloads.encode(), workloads.decode(), *workloads.reductions())
        return [self._in_turn(workload, sets) for workload in verbs]

    def _peers(self, case: Case) -> list[dict[str, Any]]:
        numel = case.size // 4
        sets = buffer_sets_for(numel)
        return [
            self._in_turn(KernelWorkload(name, moved, run), sets)
            for name, moved, run in peers(numel, sets, self.device)
        ]

    def _in_turn(self, workload: KernelWorkload, sets: int) -> dict[str, Any]:
        for warm in range(sets):
            workload.run(warm)
        turns = itertools.cycle(range(sets))
        return self._rows(workload.name, workload.bytes_moved, lambda: workload.run(next(turns)))


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes and the scale of each block of 32."""
    blocks = x.view(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scale.clamp_min(1e-38)).round().clamp(-127, 127).to(torch.int8), scale


def peers(numel: int, sets: int, device: torch.device) -> Iterator[tuple[str, int, Callable[[int], None]]]:
    """Yield the quantization of ``numel`` fp32 by other libraries, with the bytes of the most similar codec."""
    x = [torch.randn(numel // 1024, 1024, device=device) for _ in range(sets)]
    kept = max(1, numel // 100)

    def select(i: int) -> None:
        torch.topk(x[i].abs().view(-1), kept)

    moved = numel * 4 + codec("topk:ratio=0.01").wire_bytes(numel)
    yield "torch.topk(x.abs(), 1 %)", moved, select
    if device.type == "cuda":
        quantize = torch.compile(quantize_blocks)
        yield "torch.compile int8, block 32", numel * 5 + numel // 8, lambda i: quantize(x[i])
    try:
        from bitsandbytes import functional as bitsandbytes  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:

        def four_bits(i: int) -> None:
            bitsandbytes.quantize_4bit(x[i], blocksize=64)

        yield "bitsandbytes quantize_4bit, block 64", numel * 4 + numel // 2 + numel // 16, four_bits
    try:
        from torchao.quantization import quant_primitives as torchao  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:

        def affine(i: int) -> None:
            kind = torchao.MappingType.SYMMETRIC
            scale, zero = torchao.choose_qparams_affine(x[i], kind, (1, 32), torch.int8)
            torchao.quantize_affine(x[i], (1, 32), scale, zero, torch.int8)

        yield "torchao int8, block 32", numel * 5 + numel // 8, affine
    try:
        import transformer_engine.pytorch.tensor.mxfp8_tensor as engine  # type: ignore[import-not-found]
        from transformer_engine_torch import DType  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        quantizer = engine.MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)

        def mxfp8(i: int) -> None:
            quantizer(x[i])

        yield "Transformer Engine mxfp8", numel * 5 + numel // 32, mxfp8


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = harness.parser(__doc__, rounds=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", type=int, default=8, help="virtual ranks")
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[64, 1024], help="of the kernels' fp32 tensor"
    )
    parser.add_argument("--codecs", nargs="+", help="instead of the usual ones of each part")
    parser.add_argument("--seconds", type=float, default=300, help="cases that no longer fit are skipped")
    parser.add_argument(
        "--device",
        choices=("cuda", "emulator"),
        default="cuda",
        help="emulator: on the CPU, to see that it works",
    )
    return parser


def clocks(uuid: str) -> str:
    """Return clocks in MHz and the power limit in W of the GPU with this uuid, as nvidia-smi prints them."""
    fields = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={fields}", "--format=csv"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = harness.parse(make_parser(), arguments)
    if options.quick:
        options.mib, options.ranks = [0.25], 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu: torch sees no CUDA device; --device emulator tries this out", file=sys.stderr)
        return 1
    budget, results = Budget(options.seconds), harness.Results(options)
    bench = Bench(options, results, budget)
    gpu: dict[str, Any] = {"name": "emulator", "driver": None}
    if options.device == "cuda":
        gpu = device_info.describe_gpu(bench.device)
        gpu |= {"clocks": clocks(gpu["uuid"])}
    print(f"{gpu['name']}, driver {gpu['driver']}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    results.facts = {"device": gpu, "versions": device_info.versions(), "cut": budget.cuts}
    for case in cases(options):
        if budget.allows(str(case)):
            bench.measure(case)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
