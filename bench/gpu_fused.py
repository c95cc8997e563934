"""Compare fused collectives on one GPU with the memory floor and with torch's symmetric memory.

python -m bench.gpu_fused [--ranks 8] [--mib 64] [--seconds 180] [--json PATH]. `dtcomm perf --virtual 8` measures other
sizes and collectives.

Virtual ranks share the device's memory, so the floor of a two-shot all-reduce is the time of a copy (of 1 GiB, timed
alternately) for the bytes that all ranks read and write. Latency is that of one-shot in graph replays. The sizes of
published tables are measured in bf16 and printed beside their times, which are those of 8 GPUs over NVLink; here one
GPU's memory carries the traffic of all ranks. torch's and dtcomm's one- and two-shot all-reduce run between two
processes that share the device, where torch allows that; their kernels are serialised there, so only the ratio is
meaningful. Results are written after each measurement, so a run that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import report
from bench.common.budget import Budget
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure import device as device_info
from dtcomm.measure.device import make_clock, median_seconds, time_calls
from dtcomm.measure.memory_floor import TimedCopy, minimum_bytes_moved
from dtcomm.measure.published import SIZES, published_line
from dtcomm.measure.virtual_ranks import VirtualRanks

TARGETS, FLOOR = ("int8", "fp8_e4m3", "int4"), 0.85
OTHERS = ("none", "fp16", "int8:block=128", "int4:block=128,spikes=1")
PROCESSES_SECONDS = 30.0  # for two processes to start, connect and measure; their kernels are serialized
LATENCY = tuple(1 << power for power in range(10, 19))  # 1 KB to 256 KB
REPLAYS = 20


def bandwidth(
    ranks: int,
    numel: int,
    specs: list[str],
    budget: Budget,
    device: torch.device,
    copied: int = TimedCopy.LARGE,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Measure two-shot all-reduces of ``ranks`` tensors beside the floor: a copy of ``copied`` bytes."""
    clock = make_clock(device)
    copy = TimedCopy(device, clock, copied)
    mib = numel * dtype.itemsize / (1 << 20)
    xs = [torch.randn(numel, device=device).to(dtype) for _ in range(ranks)]
    outs = [torch.empty_like(x) for x in xs]
    rows = []
    for spec in specs:
        if not budget.allows(f"two_shot of {spec}, {mib:g} MiB"):
            continue
        virtual = VirtualRanks(ranks, device)
        plan = virtual.plan("all_reduce", numel, dtype, spec, algorithm="two_shot")
        run = functools.partial(virtual.run, plan, xs, outs)
        for _ in range(2):
            run()
        virtual.check()
        times = []
        for _ in range(10):
            copy.time()
            times.append(time_calls(clock, run, queued_before=copy.run))
        virtual.check()
        wire = codec(spec).wire_bytes(numel, dtype)
        moved = minimum_bytes_moved("all_reduce", "two_shot", ranks, numel, dtype.itemsize, wire)
        assert moved is not None
        rate, seconds = copy.bytes_per_second(reset=True), statistics.median(times)
        row = {
            "algorithm": "two_shot",
            "codec": spec,
            "ranks": ranks,
            "dtype": str(dtype).removeprefix("torch."),
            "mib": mib,
            "microseconds": seconds * 1e6,
            "spread": [min(times) * 1e6, max(times) * 1e6],
            "bytes": moved,
            "copy_gigabytes_per_second": rate / 1e9,
            "of_floor": moved / rate / seconds,
        }
        rows.append(row)
        print(
            f"two_shot  {ranks} x {mib:g} MiB  {spec:<16} {seconds * 1e6:>9.1f} us  "
            f"{row['of_floor']:.2f} of the floor"
        )
    return rows


def published_sizes(
    ranks: int, sizes: Sequence[int], budget: Budget, device: torch.device, copied: int
) -> Iterator[dict[str, Any]]:
    """Measure two-shot all-reduces of bf16 at the sizes of published tables; yields a row at a time."""
    for size in sizes:
        for row in bandwidth(ranks, size // 2, ["fp8_e4m3", "none"], budget, device, copied, torch.bfloat16):
            line = published_line(size)
            print(f"          published: {line or 'nothing of this size'}")
            yield {**row, "published": line}


def latency(
    ranks: int, sizes: Sequence[int], specs: list[str], budget: Budget, device: torch.device
) -> list[dict[str, Any]]:
    """Measure one-shot all-reduces of small fp32 tensors, in replays of a graph of 20 calls and launched one by one."""
    clock, rows = make_clock(device), []
    for spec in specs:
        virtual = VirtualRanks(ranks, device)
        for size in sizes:
            if not budget.allows(f"one_shot of {spec}, {size} bytes"):
                continue
            numel = size // 4
            xs = [torch.randn(numel, device=device) for _ in range(ranks)]
            outs = [torch.empty_like(x) for x in xs]
            plan = virtual.plan("all_reduce", numel, torch.float32, spec, algorithm="one_shot")

            run = functools.partial(virtual.run, plan, xs, outs)
            replay = clock.graph(run, REPLAYS)
            replayed = median_seconds(clock, replay, 10, REPLAYS)
            launched = median_seconds(clock, run, 20)
            virtual.check()
            rows.append(
                {
                    "algorithm": "one_shot",
                    "codec": spec,
                    "ranks": ranks,
                    "size": size,
                    "replayed_microseconds": replayed * 1e6,
                    "launched_microseconds": launched * 1e6,
                }
            )
            print(
                f"one_shot  {ranks} ranks  {spec:<16} {size >> 10:>4} KB  {replayed * 1e6:>7.1f} us replayed  "
                f"{launched * 1e6:>7.1f} us launched  {published_line(size)}".rstrip()
            )
    return rows


def beside_torch(rank: int, world_size: int) -> dict[str, Any]:
    """Return the microseconds of a call of torch's all-reduces and of dtcomm's; runs on each of two processes."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    import dtcomm

    times: dict[str, Any] = {}
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    device = torch.device(
        "cuda", torch.cuda.current_device()
    )  # memory of torch's lies on a device with a number
    for size in (16 << 10, 1 << 20):
        shared = memory.empty(size // 4, dtype=torch.float32, device=device)
        memory.rendezvous(shared, group)
        ordinary = torch.ones(size // 4, device="cuda")
        runs: dict[str, Callable[[], object]] = {
            "torch one_shot": lambda t=shared: torch.ops.symm_mem.one_shot_all_reduce(t, "sum", group),
            "torch two_shot": lambda t=shared: torch.ops.symm_mem.two_shot_all_reduce_(t, "sum", group),
        }
        for spec in ("none", "int8"):
            for algorithm in ("one_shot", "two_shot"):
                runs[f"dtcomm {algorithm} {spec}"] = lambda t=ordinary, s=spec, a=algorithm: (
                    dtcomm.all_reduce(t, codec=s, algorithm=a)
                )
        for name, run in runs.items():
            try:
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(10):
                    run()
                torch.cuda.synchronize()
                times[f"{name} {size}"] = (time.perf_counter() - begin) / 10 * 1e6
            except RuntimeError as error:
                times[f"{name} {size}"] = f"not run: {str(error).splitlines()[0]}"
    return times


def between_processes(budget: Budget) -> dict[str, Any]:
    """Return the slower rank's microseconds of each all-reduce, or why they did not run."""
    if not budget.allows("two processes on one device", PROCESSES_SECONDS):
        return {"not run": "cut"}
    env = {"DTCOMM_RUNTIME": "peer", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    try:
        results = run_ranks(beside_torch, 2, timeout=min(90.0, budget.left()), fresh=True, env=env)
    except Exception as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        print(f"two processes on one device: not run: {first}")
        return {"not run": first}
    worst = {
        name: max(values) if all(isinstance(value, float) for value in values) else values[0]
        for name, values in ((name, [result[name] for result in results]) for name in results[0])
    }
    for name, value in worst.items():
        print(f"two processes  {name:<32} {value if isinstance(value, str) else f'{value:.1f} us'}")
    return worst


def verdict(rows: list[dict[str, Any]]) -> str:
    """Return whether the codecs that have a target reach their share of the floor."""
    shares = {row["codec"]: row["of_floor"] for row in rows if row["codec"] in TARGETS}
    if missing := [name for name in TARGETS if name not in shares]:
        return f"not measured: {', '.join(missing)}"
    return "met" if all(share >= FLOOR for share in shares.values()) else "MISSED"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual ranks")
    parser.add_argument("--mib", type=float, default=64, help="of each rank's fp32 tensor")
    parser.add_argument("--codecs", nargs="+", default=[*TARGETS, *OTHERS])
    parser.add_argument("--sizes", type=int, nargs="+", default=LATENCY, help="bytes, of one-shot's latency")
    parser.add_argument(
        "--published",
        type=int,
        nargs="*",
        default=[size for size in SIZES if size >= 8 << 20],
        help="bytes, of published tables",
    )
    parser.add_argument(
        "--seconds", type=float, default=180, help="measurements that no longer fit are skipped and reported"
    )
    parser.add_argument("--device", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_fused: torch sees no CUDA device; --device emulator tries this out", file=sys.stderr)
        return 1
    budget, numel = Budget(options.seconds), int(options.mib * (1 << 18))
    device, copied = torch.device("cpu"), 1 << 20
    gpu: dict[str, Any] = {"name": "emulator", "driver": None}
    if options.device == "cuda":
        device, copied = torch.device("cuda", torch.cuda.current_device()), TimedCopy.LARGE
        gpu = device_info.describe_gpu(device)
    print(f"{gpu['name']}, driver {gpu['driver']}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    # Codecs with a target come first, so that others are skipped if time runs out.
    targets = [spec for spec in options.codecs if spec in TARGETS]
    others = [spec for spec in options.codecs if spec not in TARGETS]
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "device": gpu,
        "versions": device_info.versions(),
        "bandwidth": rows,
        "latency": [],
        "published": [],
        "processes": {"not run": "cut"},
        "seconds": options.seconds,
        "cut": budget.cuts,
    }

    def keep() -> None:
        result["verdict"] = verdict(rows)
        if options.json:
            report.write(options.json, result)

    for spec in targets:
        rows += bandwidth(options.ranks, numel, [spec], budget, device, copied)
        keep()
    for spec in ("none", "int8"):
        result["latency"] += latency(options.ranks, options.sizes, [spec], budget, device)
        keep()
    for row in published_sizes(options.ranks, options.published, budget, device, copied):
        result["published"].append(row)
        keep()
    for spec in others:
        rows += bandwidth(options.ranks, numel, [spec], budget, device, copied)
        keep()
    result["processes"] = between_processes(budget)
    keep()
    print(f"two_shot of {', '.join(TARGETS)} at {FLOOR} of the floor: {result['verdict']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
