"""Compare each kernel on fp32 data on one core with memcpy of the same input and with plain torch.

python -m bench.kernels [--kernel NAME] [--codecs SPEC ...] [--sizes BYTES ...] [--seconds S] [--json [FILE]]

By default all codecs of docs/results/codecs.md are measured, whose speeds these are, lossless on weights of bf16 and of
fp32. A codec's kernels, a memcpy, a streaming copy and the plain torch version take turns; a ratio is the median over
rounds of the ratios of one round. GB/s count the input (for decoding, the output). The floor is the time in which the
faster copy of this size moves the bytes that must be read and written.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.common import kernel_targets, machine, output, torch_codecs
from bench.common.pool import pin
from bench.common.stats import Timing, iterations
from dtcomm import _C
from dtcomm.cli.codecs.main import default_codecs
from dtcomm.codecs import Codec, codec
from dtcomm.kernels import available, cpu, dispatch

SKEW = 276 << 10  # buffers whose addresses are equal modulo the cache size evict each other
PLACEMENTS = 4  # allocations of the buffers: which pages they get changes a result by up to a fifth
MORE = ("int8:rotate=hadamard", "int4:spikes=1,round=stochastic")  # beside those of the page
FEWEST_ROUNDS = 3  # for each placement, however slow a contestant is
COPIES = ("memcpy", "streaming copy")


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A measured function: `run(n)` does the work n times; `peer` is the torch contestant it is compared with."""

    name: str
    run: Callable[[int], object]
    moved: int  # bytes that any implementation must read and write
    codec: str = ""
    verb: str = ""
    peer: str | None = None
    payload: int = 0  # bytes of the payload


class Buffers:
    """Tensors in one arena, each at an offset that differs from the previous one in the cache sets."""

    def __init__(self, size: int) -> None:
        self.arena = torch.zeros(7 * (size + 2 * SKEW), dtype=torch.uint8)
        self.at = -self.arena.data_ptr() % 4096

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * dtype.itemsize
        tensor = self.arena[self.at : self.at + size].view(dtype)
        self.at += -(-(size + SKEW) // 64) * 64
        return tensor


def combine(
    kernel: str,
    tested: Codec,
    n: int,
    repeats: int,
    *,
    local: torch.Tensor | None = None,
    payloads: tuple[torch.Tensor, ...] = (),
    payload_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Call the native kernel `repeats` times, without Python between the calls."""
    address = [0 if t is None else t.data_ptr() for t in (local, residual, payload_out, out)]
    streams = [t is not None and t.numel() * t.itemsize >= cpu.STREAM_BYTES for t in (payload_out, out)]
    addresses = [payload.data_ptr() for payload in payloads]
    _C.repeat_kernel(
        kernel, tested.native(), addresses, *address[:2], n, *address[2:], *streams, repeats=repeats
    )


def decode(
    kernel: str, tested: Codec, n: int, stream: bool, payload: torch.Tensor, out: torch.Tensor, repeats: int
) -> None:
    """Decode `repeats` times; codec `none` without `stream` is libc's memcpy."""
    addresses = [payload.data_ptr()]
    _C.repeat_kernel(
        kernel, tested.native(), addresses, 0, 0, n, 0, out.data_ptr(), False, stream, repeats=repeats
    )


def repeated(function: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        function()


def copies(size: int, kernel: str, x: torch.Tensor, y: torch.Tensor) -> list[Contestant]:
    """Return the two copies that everything is compared with."""
    none = codec("none")
    return [
        Contestant(name=name, run=partial(decode, kernel, none, size // 4, stream, x, y), moved=2 * size)
        for name, stream in zip(COPIES, (False, True), strict=True)
    ]


def sums(size: int, kernel: str, buffers: Buffers) -> list[Contestant]:
    """Return the sums of uncompressed floats, torch's addition and the copies."""
    n, none = size // 4, codec("none")
    x, y, z, w = (buffers.take(n, torch.float32).normal_() for _ in range(4))
    raw = z.view(torch.uint8)
    contestants = copies(size, kernel, x, y)
    contestants.append(
        Contestant(name="torch: add", run=partial(repeated, partial(torch.add, x, z, out=w)), moved=0)
    )
    for count, peer in ((2, "torch: add"), (4, None)):
        run = partial(combine, kernel, none, n, local=x, payloads=(raw,) * (count - 1), out=w)
        contestants.append(Contestant(name=f"none sum of {count}", run=run, moved=3 * size, peer=peer))
    return contestants


def weights(out: torch.Tensor) -> torch.Tensor:
    """Fill `out` like trained weights: Gaussian rows of 1024, whose deviations differ by about a third."""
    rows = out.view(-1, math.gcd(out.numel(), 1024))
    deviations = 0.02 * torch.randn(rows.shape[0], 1).mul_(0.3).exp_()
    rows.copy_(torch.randn(rows.shape).mul_(deviations))
    return out


def lossless(size: int, kernel: str, buffers: Buffers) -> list[Contestant]:
    """Return the lossless codec's verbs at `size` bytes of weights in bf16 and in fp32, and the copies."""
    tested = codec("lossless")
    entries: list[Contestant] = []
    for dtype in (torch.bfloat16, torch.float32):
        n, element = size // dtype.itemsize, str(dtype).removeprefix("torch.")
        x, y = weights(buffers.take(n, dtype)), buffers.take(n, dtype)
        payload = buffers.take(tested.wire_bytes(n, dtype), torch.uint8)
        pointers = (x.data_ptr(), y.data_ptr(), payload.data_ptr())
        length = _C.encode_lossless(kernel, pointers[0], n, dtype.itemsize, pointers[2])
        verbs: dict[str, Callable[[], object]] = {
            "encode": partial(_C.encode_lossless, kernel, pointers[0], n, dtype.itemsize, pointers[2]),
            "decode": partial(
                _C.decode_lossless, kernel, pointers[2], length, n, dtype.itemsize, pointers[1]
            ),
        }
        if not entries:
            entries += copies(size, kernel, x.view(torch.float32), y.view(torch.float32))
        for verb, call in verbs.items():
            entries.append(
                Contestant(
                    name=f"lossless {verb}, {element}",
                    run=partial(repeated, call),
                    moved=size + length,
                    codec="lossless",
                    verb=f"{verb}, {element}",
                    payload=length,
                )
            )
    return entries


def contestants(size: int, kernel: str, tested: Codec, buffers: Buffers) -> list[Contestant]:
    """Return every verb of a codec at `size` bytes of fp32, its peers in torch, and the copies."""
    if tested.variable_length:
        return lossless(size, kernel, buffers)
    n, spec, wire = size // 4, str(tested), tested.wire_bytes(size // 4)
    x, y, residual = (buffers.take(n, torch.float32) for _ in range(3))
    x.normal_()
    residual.zero_()
    payload, other, again = (buffers.take(wire, torch.uint8) for _ in range(3))
    for into in (payload, other):
        combine(kernel, tested, n, 1, local=x, payload_out=into)
    two = (payload, other)
    call = partial(combine, kernel, tested, n)
    verbs: dict[str, tuple[Callable[[int], object], int]] = {
        "encode": (partial(call, local=x, payload_out=again), size + wire),
        "decode": (partial(decode, kernel, tested, n, size >= cpu.STREAM_BYTES, payload, y), size + wire),
        "reduce of 2": (partial(call, payloads=two, out=y), size + 2 * wire),
        "reduce_encode of 2": (
            partial(call, local=x, payloads=(payload,), payload_out=again),
            size + 2 * wire,
        ),
        "encode with residual": (
            partial(call, local=x, residual=residual, payload_out=again),
            3 * size + wire,
        ),
    }
    entries = copies(size, kernel, x, y)
    in_torch = torch_codecs.peers(tested, x)
    for verb, function in in_torch.items():
        entries.append(Contestant(name=f"torch: {spec} {verb}", run=partial(repeated, function), moved=0))
    for verb, (run, moved) in verbs.items():
        peer = f"torch: {spec} {verb}" if verb in in_torch else None
        entries.append(
            Contestant(
                name=f"{spec} {verb}", run=run, moved=moved, codec=spec, verb=verb, peer=peer, payload=wire
            )
        )
    return entries


def measure(contestants: list[Contestant], seconds: float) -> dict[str, list[float]]:
    """Return the seconds of a call of every contestant in every round; they take turns for about `seconds`.

    The clock is that of this thread, which does all the work; time that other processes use on its core does not count.
    """
    repeats = {}
    for contestant in contestants:
        contestant.run(1)
        start = time.thread_time()
        contestant.run(1)
        repeats[contestant.name] = iterations(time.thread_time() - start, 0.002)
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["memcpy"]) < FEWEST_ROUNDS:
        for contestant in contestants:
            start = time.thread_time()
            contestant.run(repeats[contestant.name])
            times[contestant.name].append((time.thread_time() - start) / repeats[contestant.name])
    return times


def ratios(peer: list[float], ours: list[float]) -> Timing:
    """Return how many times faster than `peer` the contestant is, by the ratios of the rounds."""
    return Timing.of([p / o for p, o in zip(peer, ours, strict=True)])


def report(
    size: int, kernel: str, contestants: list[Contestant], times: dict[str, list[float]]
) -> list[dict[str, object]]:
    """Print the table of one size and return its rows."""
    rows: list[dict[str, object]] = []
    cells: list[list[str]] = []
    bandwidth = 2 * size / min(statistics.median(times[name]) for name in COPIES)
    title = contestants[-1].codec or "none"
    for contestant in contestants:
        timing = Timing.of(times[contestant.name])
        memcpy = ratios(times["memcpy"], times[contestant.name])
        peer = ratios(times[contestant.peer], times[contestant.name]) if contestant.peer else None
        floor = contestant.moved / bandwidth / timing.median if contestant.moved else None
        payload = contestant.payload / size if contestant.payload else None
        rows.append(
            {
                "name": contestant.name,
                "beside": title,  # memcpy and the sums are measured again with every codec
                "codec": contestant.codec,
                "verb": contestant.verb,
                "bytes": size,
                "gb_per_s": round(size / timing.median / 1e9, 2),
                "times_memcpy": round(memcpy.median, 3),
                "times_memcpy_quartiles": [round(memcpy.low, 3), round(memcpy.high, 3)],
                "times_torch": None if peer is None else round(peer.median, 2),
                "fraction_of_floor": None if floor is None else round(floor, 3),
                "payload_fraction": None if payload is None else round(payload, 4),
                **timing.as_dict(),
            }
        )
        cells.append(
            [
                contestant.name,
                f"{size / timing.median / 1e9:.1f}",
                f"{100 * timing.spread:.0f} %",
                f"{memcpy.median:.2f}",
                f"{memcpy.low:.2f} to {memcpy.high:.2f}",
                "" if peer is None else f"{peer.median:.2f}",
                "" if floor is None else f"{100 * floor:.0f} %",
                "" if payload is None else f"{100 * payload:.1f} %",
            ]
        )
    columns = ["", "GB/s", "spread", "x memcpy", "quartiles", "x torch", "of the floor", "payload"]
    elements = "weights" if title == "lossless" else "fp32"
    output.table(f"{title}: {kernel}, one core, {output.size_name(size)} of {elements}", columns, cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in available() if name != "reference"]
    parser.add_argument("--kernel", default=dispatch.native_kernel(), choices=names)
    parser.add_argument("--codecs", nargs="+", metavar="SPEC", help="default: every name, with some options")
    parser.add_argument("--sizes", type=int, nargs="+", default=[kernel_targets.CACHE, kernel_targets.DRAM])
    parser.add_argument("--seconds", type=float, default=4, help="for each size and codec")
    parser.add_argument("--cpu", type=int, default=0, help="which of this process's CPUs to run on")
    parser.add_argument("--json", nargs="?", const="", help="write bench/results/kernels.json, or this file")
    options = parser.parse_args()
    default = [str(tested) for tested in default_codecs() if str(tested) != "none"]
    chosen = [codec(spec) for spec in options.codecs or dict.fromkeys([*default, *MORE])]
    settings: dict[str, object] = {"machine": machine.describe(), "kernel": options.kernel}
    pin(options.cpu)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for size in options.sizes:
        contestants_by_codec: dict[str, list[Contestant]] = {}
        times: dict[str, dict[str, list[float]]] = {}
        for _ in range(PLACEMENTS):
            buffers = Buffers(size)
            first = buffers.at
            for tested in [None, *chosen]:
                buffers.at = first  # all codecs use the same memory
                key = str(tested)
                contestants_by_codec[key] = (
                    contestants(size, options.kernel, tested, buffers)
                    if tested
                    else sums(size, options.kernel, buffers)
                )
                for name, seconds in measure(contestants_by_codec[key], options.seconds / PLACEMENTS).items():
                    times.setdefault(key, {}).setdefault(name, []).extend(seconds)
        for key, group in contestants_by_codec.items():
            rows += report(size, options.kernel, group, times[key])
    verdicts = kernel_targets.verdicts(rows)
    for verdict in verdicts:
        size = output.size_name(verdict["bytes"])
        print(
            f"{verdict['verdict']}  {verdict['codec']} {verdict['verb']}, {size}: {verdict['figure']} {verdict['what']}"
            f" (at least {verdict['least']})"
        )
    if options.json is not None:
        settings["load"] = os.getloadavg()
        print(output.write("kernels", {**settings, "rows": rows, "verdicts": verdicts}, options.json or None))


if __name__ == "__main__":
    main()
