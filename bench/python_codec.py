"""Compare int8 written in Python (`dtcomm.codecs.custom`) with dtcomm's own int8 in all_reduce.

python -m bench.python_codec [--ranks 2] [--sizes 64K 1M 16M] [--repetitions 15] [--threads 1] [--json FILE]

Both send 8.5 bits for each element, over shared memory. They take turns in every repetition; a time is that of the
slowest rank. The ratio is that of one repetition's times, median and quartiles over the repetitions.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from bench.common import machine, output
from bench.common.stats import Timing
from dtcomm.cli._sizes import parse_size
from dtcomm.launch.ranks import run_ranks

BLOCK = 32
SPECS = ("int8", "int8_in_python")


def encode(x: torch.Tensor) -> torch.Tensor:
    """Return a bf16 scale for each block of 32 elements, then the blocks as int8."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = (rows.abs().amax(1) / 127).bfloat16()
    wide = scale.float()
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    codes = (rows * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8).view(-1)])


def decode(payload: torch.Tensor, n: int) -> torch.Tensor:
    """Return the elements of a payload."""
    blocks = -(-n // BLOCK)
    scale = payload[: 2 * blocks].view(torch.bfloat16).float()
    codes = payload[2 * blocks :].view(torch.int8).view(-1, BLOCK)
    return (codes.float() * scale[:, None]).view(-1)[:n]


def wire_bytes(n: int) -> int:
    """Return the bytes of a payload of n elements."""
    return (2 + BLOCK) * -(-n // BLOCK)


def measure(rank: int, ranks: int, sizes: list[int], repetitions: int, threads: int) -> Any:
    """Return, for each size and codec, the seconds of a call of the slowest rank in each repetition."""
    torch.set_num_threads(threads)
    dtcomm.codecs.custom(SPECS[1], encode, decode, wire_bytes)
    times: dict[tuple[int, str], list[float]] = {}
    for size in sizes:
        x = torch.randn(size // 4)
        calls = max(1, min(10, (4 << 20) // size))
        for repetition in range(-1, repetitions):  # the first one warms up
            for spec in SPECS:
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    dtcomm.all_reduce(x, "avg", codec=spec)
                seconds = torch.tensor((time.perf_counter() - start) / calls)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if repetition >= 0:
                    times.setdefault((size, spec), []).append(float(seconds))
    return times


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["64K", "1M", "16M"], help="bytes of the fp32 tensor")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch's threads in each rank, as torchrun sets"
    )
    parser.add_argument("--json", help="where to write instead of bench/results/python_codec.json")
    options = parser.parse_args(arguments)
    sizes = [parse_size(text) for text in options.sizes]
    load = machine.load()
    times = run_ranks(
        measure,
        options.ranks,
        sizes,
        options.repetitions,
        options.threads,
        fresh=True,
        timeout=600,
        env={"OMP_NUM_THREADS": str(options.threads)},
    )[0]
    rows, lines = [], []
    for text, size in zip(options.sizes, sizes, strict=True):
        native, python = (times[size, spec] for spec in SPECS)
        ratio = Timing.of([ours / theirs for ours, theirs in zip(python, native, strict=True)])
        native_time, python_time = Timing.of(native), Timing.of(python)
        rows.append(
            {
                "bytes": size,
                "times_native": round(ratio.median, 2),
                "times_native_quartiles": [round(ratio.low, 2), round(ratio.high, 2)],
                "native": native_time.as_dict(),
                "python": python_time.as_dict(),
            }
        )
        lines.append(
            [
                text,
                output.microseconds(native_time.median),
                output.microseconds(python_time.median),
                f"{ratio.median:.1f}x ({ratio.low:.1f} to {ratio.high:.1f})",
            ]
        )
    title = f"all_reduce of int8, {options.ranks} ranks, {options.repetitions} repetitions"
    output.table(title, ["bytes", "native us", "Python us", "Python / native"], lines)
    print(f"{machine.describe()}\nload average {load} before")
    result = {"machine": machine.describe(), "ranks": options.ranks, "load": load, "rows": rows}
    print(output.write("python_codec", result, options.json))
    return result


if __name__ == "__main__":
    main()
