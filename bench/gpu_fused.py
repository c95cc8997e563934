"""Fused collectives on one GPU beside the memory floor and torch's symmetric memory: python -m bench.gpu_fused
[--ranks 8] [--mib 64] [--json PATH].

Virtual ranks share the device's memory, so the floor of a two-shot all-reduce is the time that a copy of 1 GiB, timed
in turn with it, would need for the bytes that all ranks together read and write. Latency is that of one-shot by graph
replays, from launch to finish. torch's one- and two-shot all-reduce, and ours, run between two processes that share the
device where torch allows that; kernels of two processes take turns there, so only their ratio says something.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CODECS = ("none", "fp16", "int8", "int8:block=128", "int4", "fp8_e4m3")
LATENCY = tuple(1 << power for power in range(10, 19))  # 1 KB to 256 KB
REPLAYS = 20


def device_seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Of one of ``calls`` calls that ``run`` makes on the current stream, between device events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def moved_bytes(algorithm: str, ranks: int, numel: int, wire: int) -> int:
    """What all virtual ranks of an all-reduce read and write at the least; ``wire`` is the whole tensor's payload."""
    tensor = 2 * 4 * numel  # read and written once, fp32
    if algorithm == "one_shot":  # written to all, own slot included, and all read
        return ranks * (tensor + 2 * ranks * wire)
    # Payloads of the others' chunks written and read, then the sum's: written to all, read by all.
    others = (ranks - 1) * wire // ranks
    return ranks * (tensor + 4 * others + 2 * (wire // ranks))


def graphed(run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """``calls`` calls as one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def bandwidth(ranks: int, mib: int, specs: list[str]) -> list[dict[str, Any]]:
    """Two-shot all-reduce of ``ranks`` tensors of ``mib`` MiB beside the floor."""
    from dtcomm.codecs import codec
    from dtcomm.testing.virtual import VirtualRanks

    numel = mib << 18
    ends = [torch.empty(1 << 28, device="cuda") for _ in range(2)]
    xs = [torch.randn(numel, device="cuda") for _ in range(ranks)]
    outs = [torch.empty_like(x) for x in xs]
    rows = []
    for spec in specs:
        virtual = VirtualRanks(ranks, "cuda")
        plan = virtual.plan("all_reduce", numel, torch.float32, spec, algorithm="two_shot")
        for _ in range(2):
            virtual.run(plan, xs, outs)
        virtual.check()
        run = functools.partial(virtual.run, plan, xs, outs)
        copies, times = [], []
        for _ in range(10):
            copies.append(device_seconds(lambda: ends[1].copy_(ends[0])))
            times.append(device_seconds(run))
        virtual.check()
        moved = moved_bytes("two_shot", ranks, numel, codec(spec).wire_bytes(numel, torch.float32))
        copy = 2 * ends[0].nbytes / statistics.median(copies)
        seconds = statistics.median(times)
        row = {
            "algorithm": "two_shot",
            "codec": spec,
            "ranks": ranks,
            "mib": mib,
            "microseconds": seconds * 1e6,
            "spread": [min(times) * 1e6, max(times) * 1e6],
            "bytes": moved,
            "copy_gigabytes_per_second": copy / 1e9,
            "of_floor": moved / copy / seconds,
        }
        rows.append(row)
        print(
            f"two_shot  {ranks} x {mib} MiB  {spec:<16} {seconds * 1e6:>9.1f} us  {row['of_floor']:.2f} of the floor"
        )
    return rows


def latency(ranks: int, specs: list[str]) -> list[dict[str, Any]]:
    """One-shot all-reduce of small tensors, fp32 bytes, by replays of a graph of 20 calls, and launched one by one."""
    from dtcomm.testing.virtual import VirtualRanks

    rows = []
    for spec in specs:
        virtual = VirtualRanks(ranks, "cuda")
        for size in LATENCY:
            numel = size // 4
            xs = [torch.randn(numel, device="cuda") for _ in range(ranks)]
            outs = [torch.empty_like(x) for x in xs]
            plan = virtual.plan("all_reduce", numel, torch.float32, spec, algorithm="one_shot")

            run = functools.partial(virtual.run, plan, xs, outs)
            graph = graphed(run, REPLAYS)
            replayed = statistics.median(device_seconds(graph.replay, REPLAYS) for _ in range(10))
            launched = statistics.median(device_seconds(run) for _ in range(20))
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
                f"{launched * 1e6:>7.1f} us launched"
            )
    return rows


def beside_torch(rank: int, world_size: int) -> dict[str, Any]:
    """On each of two processes: microseconds a call of torch's all-reduces and of ours."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    import dtcomm

    said: dict[str, Any] = {}
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for size in (16 << 10, 1 << 20):
        shared = memory.empty(size // 4, dtype=torch.float32, device="cuda")
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
                said[f"{name} {size}"] = (time.perf_counter() - begin) / 10 * 1e6
            except RuntimeError as error:
                said[f"{name} {size}"] = f"not run: {str(error).splitlines()[0]}"
    return said


def between_processes() -> dict[str, Any]:
    """The same of the slower rank, or why it did not run."""
    from dtcomm.testing.ranks import run_ranks

    env = {"DTCOMM_RUNTIME": "peer", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    try:
        said = run_ranks(beside_torch, 2, timeout=90, fresh=True, env=env)
    except Exception as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        print(f"two processes on one device: not run: {first}")
        return {"not run": first}
    worst = {
        name: max(values) if all(isinstance(value, float) for value in values) else values[0]
        for name, values in ((name, [each[name] for each in said]) for name in said[0])
    }
    for name, value in worst.items():
        print(f"two processes  {name:<32} {value if isinstance(value, str) else f'{value:.1f} us'}")
    return worst


def about() -> dict[str, Any]:
    """The device, its driver and the versions."""
    from dtcomm import _cuda

    properties = torch.cuda.get_device_properties(0)
    found = _cuda.platform()
    return {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": found["driver"],
        "runtime": found["runtime"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="virtual ranks")
    parser.add_argument("--mib", type=int, default=64, help="of each rank's fp32 tensor")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu_fused: torch sees no CUDA device", file=sys.stderr)
        return 1
    result = about()
    print(f"{result['device']}, torch {result['torch']}, CUDA {result['cuda']}")
    result["bandwidth"] = bandwidth(options.ranks, options.mib, options.codecs)
    result["latency"] = latency(options.ranks, ["none", "int8"])
    result["processes"] = between_processes()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    short = [row for row in result["bandwidth"] if row["codec"] in ("int8", "fp8_e4m3", "int4")]
    met = all(row["of_floor"] >= 0.85 for row in short)
    print(f"two_shot of int8, fp8 and int4 at 0.85 of the floor: {'met' if met else 'MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
