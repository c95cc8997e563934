"""What one core does to fp32 with each kernel, beside memcpy of the same input and the same thing in torch.

python -m bench.kernels [--kernel NAME] [--sizes BYTES ...] [--seconds S] [--json [FILE]]

All contestants of a size take turns; a ratio is the median over the rounds of one round's times. GB/s count
the fp32 input (or, for decoding, output). The floor is the time in which the fastest copy of this size moves
the bytes that must be read and written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.common import machine, output
from bench.common.pool import pin
from bench.common.stats import Timing, iterations
from dtcomm import _C
from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import available, native

KB, MB = 1 << 10, 1 << 20
SKEW = 276 * KB  # buffers whose addresses agree modulo the cache evict each other
PLACEMENTS = 8  # times that the buffers are made anew: which pages they get moves a result by a fifth
F32 = ELEMENT_TYPES[torch.float32]
CODECS = ("fp16", "bf16", "int8", "int8:symmetric=false", "int8:round=stochastic")


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """`run(n)` does the work n times; `peer` is the torch contestant it is compared with."""

    name: str
    run: Callable[[int], object]
    moved: int  # bytes that any implementation must read and write
    peer: str | None = None


class Buffers:
    """Tensors in one arena, each skewed against the one before."""

    def __init__(self, size: int) -> None:
        self.arena = torch.zeros(9 * (size + 2 * SKEW), dtype=torch.uint8)
        self.at = -self.arena.data_ptr() % 4096

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * dtype.itemsize
        taken = self.arena[self.at : self.at + size].view(dtype)
        self.at += -(-(size + SKEW) // 64) * 64
        return taken


def combine(
    kernel: str,
    which: Codec,
    n: int,
    repeats: int,
    *,
    local: torch.Tensor | None = None,
    payloads: tuple[torch.Tensor, ...] = (),
    payload_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """`repeats` calls of the native kernel, timed without Python between them."""
    address = [0 if t is None else t.data_ptr() for t in (local, residual, payload_out, out)]
    streams = [t is not None and t.numel() * t.itemsize >= native.STREAM_BYTES for t in (payload_out, out)]
    _C.combine(
        kernel,
        which.native(),
        [payload.data_ptr() for payload in payloads],
        len(payloads),
        address[0],
        F32,
        address[1],
        address[1],
        n,
        1,
        0,
        7,
        0,
        address[2],
        address[3],
        F32,
        F32,
        *streams,
        repeats,
    )


def decode(
    kernel: str, which: Codec, n: int, stream: bool, payload: torch.Tensor, out: torch.Tensor, repeats: int
) -> None:
    """`repeats` decodings; of `none` without `stream` this is libc's memcpy."""
    _C.decode(kernel, which.native(), payload.data_ptr(), n, F32, out.data_ptr(), F32, stream, repeats)


def torch_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled int8 as one writes it in torch, zero blocks included."""
    blocks = x.view(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = torch.clamp(torch.round(blocks * inverse), -127, 127).to(torch.int8)
    return codes, scale


def repeated(function: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        function()


def contestants(size: int, kernel: str) -> list[Contestant]:
    """Everything that is timed at `size` bytes of fp32."""
    n, none = size // 4, codec("none")
    buffers = Buffers(size)
    x, y, z, w = (buffers.take(n, torch.float32) for _ in range(4))
    for tensor in (x, z):
        tensor.normal_()
    half, brain = buffers.take(n, torch.float16), buffers.take(n, torch.bfloat16)
    stream = size >= native.STREAM_BYTES
    found = [
        Contestant(name="memcpy", run=partial(decode, kernel, none, n, False, x, y), moved=2 * size),
        Contestant(name="streaming copy", run=partial(decode, kernel, none, n, True, x, y), moved=2 * size),
        Contestant(name="torch: to fp16", run=partial(repeated, partial(half.copy_, x)), moved=0),
        Contestant(name="torch: to bf16", run=partial(repeated, partial(brain.copy_, x)), moved=0),
        Contestant(name="torch: int8", run=partial(repeated, partial(torch_int8, x)), moved=0),
        Contestant(name="torch: add", run=partial(repeated, partial(torch.add, x, z, out=w)), moved=0),
        Contestant(
            name="none sum of 2",
            run=partial(combine, kernel, none, n, local=x, payloads=(z.view(torch.uint8),), out=w),
            moved=3 * size,
            peer="torch: add",
        ),
        Contestant(
            name="none sum of 4",
            run=partial(combine, kernel, none, n, local=x, payloads=(z.view(torch.uint8),) * 3, out=w),
            moved=3 * size,
        ),
    ]
    for spec in CODECS:
        which = codec(spec)
        wire = which.wire_bytes(n)
        payload, again = buffers.take(wire, torch.uint8), buffers.take(wire, torch.uint8)
        combine(kernel, which, n, 1, local=x, payload_out=payload)
        peers = {"fp16": "torch: to fp16", "bf16": "torch: to bf16", "int8": "torch: int8"}
        found += [
            Contestant(
                name=f"{spec} encode",
                run=partial(combine, kernel, which, n, local=x, payload_out=payload),
                moved=size + wire,
                peer=peers.get(spec),
            ),
            Contestant(
                name=f"{spec} decode",
                run=partial(decode, kernel, which, n, stream, payload, y),
                moved=size + wire,
            ),
        ]
        if spec in peers:
            found.append(
                Contestant(
                    name=f"{spec} reduce_encode of 2",
                    run=partial(combine, kernel, which, n, local=x, payloads=(payload,), payload_out=again),
                    moved=size + 2 * wire,
                )
            )
        buffers.at -= 2 * (-(-(wire + SKEW) // 64) * 64)  # the next codec uses the same memory
    return found


def measure(everyone: list[Contestant], seconds: float) -> dict[str, list[float]]:
    """Seconds of one call, a value a round, for every contestant, taking turns for about `seconds`.

    The clock is the thread's: all is done by this one, and what others do on its core in between does not count.
    """
    repeats = {}
    for each in everyone:
        each.run(1)
        start = time.thread_time()
        each.run(1)
        repeats[each.name] = iterations(time.thread_time() - start, 0.002)
    times: dict[str, list[float]] = {each.name: [] for each in everyone}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["memcpy"]) < 3:
        for each in everyone:
            start = time.thread_time()
            each.run(repeats[each.name])
            times[each.name].append((time.thread_time() - start) / repeats[each.name])
    return times


def ratios(peer: list[float], ours: list[float]) -> Timing:
    """How many times faster than `peer`, round by round."""
    return Timing.of([p / o for p, o in zip(peer, ours, strict=True)])


def report(
    size: int, kernel: str, everyone: list[Contestant], times: dict[str, list[float]]
) -> list[dict[str, object]]:
    """Prints the table of one size and returns its rows."""
    rows: list[dict[str, object]] = []
    cells: list[list[str]] = []
    copies = [statistics.median(times[name]) for name in ("memcpy", "streaming copy")]
    bandwidth = 2 * size / min(copies)
    for each in everyone:
        timing = Timing.of(times[each.name])
        memcpy = ratios(times["memcpy"], times[each.name])
        peer = ratios(times[each.peer], times[each.name]) if each.peer else None
        floor = each.moved / bandwidth / timing.median if each.moved else None
        rows.append(
            {
                "name": each.name,
                "bytes": size,
                "gb_per_s": round(size / timing.median / 1e9, 2),
                "times_memcpy": round(memcpy.median, 3),
                "times_memcpy_quartiles": [round(memcpy.low, 3), round(memcpy.high, 3)],
                "times_torch": None if peer is None else round(peer.median, 2),
                "fraction_of_floor": None if floor is None else round(floor, 3),
                **timing.as_dict(),
            }
        )
        cells.append(
            [
                each.name,
                f"{size / timing.median / 1e9:.1f}",
                f"{100 * timing.spread:.0f} %",
                f"{memcpy.median:.2f}",
                f"{memcpy.low:.2f} to {memcpy.high:.2f}",
                "" if peer is None else f"{peer.median:.2f}",
                "" if floor is None else f"{100 * floor:.0f} %",
            ]
        )
    columns = ["", "GB/s", "spread", "x memcpy", "quartiles", "x torch", "of the floor"]
    output.table(f"{kernel}, one core, {output.size_name(size)} of fp32", columns, cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in available() if name != "reference"]
    parser.add_argument("--kernel", default=native.current_name(), choices=names)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256 * KB, 64 * MB])
    parser.add_argument("--seconds", type=float, default=15, help="for each size")
    parser.add_argument("--cpu", type=int, default=0, help="which of this process's CPUs to run on")
    parser.add_argument("--json", nargs="?", const="", help="write bench/results/kernels.json, or this file")
    options = parser.parse_args()
    told: dict[str, object] = {"machine": machine.describe(), "kernel": options.kernel}
    pin(options.cpu)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for size in options.sizes:
        times: dict[str, list[float]] = {}
        for _ in range(PLACEMENTS):
            everyone = contestants(size, options.kernel)
            for name, seconds in measure(everyone, options.seconds / PLACEMENTS).items():
                times.setdefault(name, []).extend(seconds)
        rows += report(size, options.kernel, everyone, times)
    if options.json is not None:
        told["load"] = os.getloadavg()
        print(output.write("kernels", {**told, "rows": rows}, options.json or None))


if __name__ == "__main__":
    main()
