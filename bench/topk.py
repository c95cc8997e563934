"""Measure the time of one core to keep the largest 1 % of fp32 values, beside `torch.topk` on the same core.

python -m bench.topk [--numel N] [--ratio R] [--kernel NAME] [--rounds N] [--cpu CPU] [--json [FILE]]

The peer only selects: ``torch.topk(x.abs(), k)``, without residual and payload. dtcomm adds the residual, selects in
every granule, and writes the payload and the new residual. Contestants take turns and are timed by the thread's CPU
clock; a ratio is the median over rounds of the ratios of one round. The floor is ``residual.add_(x)``, which reads and
writes what an encoding with residual must (except the payload), and otherwise the bandwidth of the fastest copy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.common import machine, output
from bench.common.pool import pin
from bench.common.stats import Timing
from bench.kernels import Buffers, combine, decode, ratios, repeated
from dtcomm.codecs import codec
from dtcomm.kernels import available, cpu, dispatch

PEER, FLOOR, COPY = "torch.topk(x.abs(), k)", "residual.add_(x)", "streaming copy"
TARGET = 40.0  # times faster than the peer
WARM_STEPS = 8  # of error feedback, so that the residual is like that of a training run
VALUES = ("bf16", "fp32", "int8")


def contestants(numel: int, ratio: float, kernel: str) -> dict[str, tuple[Callable[[int], object], int]]:
    """Return by name a function that runs n times, and the bytes that it must read and write."""
    buffers, size = Buffers(4 * numel), 4 * numel
    x, y, residual = (buffers.take(numel, torch.float32) for _ in range(3))
    x.normal_()
    count = max(1, round(ratio * numel))
    none = codec("none")
    entries: dict[str, tuple[Callable[[int], object], int]] = {
        PEER: (partial(repeated, lambda: torch.topk(x.abs(), count)), 0),
        FLOOR: (partial(repeated, lambda: residual.add_(x)), 3 * size),
        COPY: (partial(decode, kernel, none, numel, True, x, y), 2 * size),
    }
    for name in ("topk", "randk"):
        for values in VALUES if name == "topk" else VALUES[:1]:
            tested = codec(f"{name}:ratio={ratio!r},values={values}")
            wire = tested.wire_bytes(numel)
            payload = buffers.take(wire, torch.uint8)
            own = buffers.take(numel, torch.float32) if name == "topk" and values == "bf16" else residual
            encode = partial(combine, kernel, tested, numel, local=x, payload_out=payload)
            if own is not residual:
                partial(encode, residual=own)(WARM_STEPS)
                entries[f"{tested} encode with residual"] = (partial(encode, residual=own), 3 * size + wire)
            entries[f"{tested} encode"] = (encode, size + wire)
            decoding = partial(decode, kernel, tested, numel, size >= cpu.STREAM_BYTES, payload, y)
            if values == "bf16":
                entries[f"{tested} decode"] = (decoding, size + wire)
    return entries


def measure(entries: dict[str, tuple[Callable[[int], object], int]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a call of every contestant in every round."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for turn in range(rounds + 1):
        for name, (run, _) in entries.items():
            start = time.thread_time()
            run(1)
            if turn:  # the first one warms up
                times[name].append(time.thread_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in available() if name != "reference"]
    parser.add_argument("--numel", type=int, default=16 << 20)
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--kernel", default=dispatch.native_kernel(), choices=names)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", type=int, default=0, help="which of this process's CPUs to run on")
    parser.add_argument("--json", nargs="?", const="", help="write bench/results/topk.json, or this file")
    options = parser.parse_args()
    settings: dict[str, object] = {"machine": machine.describe(), "kernel": options.kernel}
    pin(options.cpu)
    torch.set_num_threads(1)
    entries = contestants(options.numel, options.ratio, options.kernel)
    times = measure(entries, options.rounds)
    bandwidth = entries[COPY][1] / statistics.median(times[COPY])
    rows: list[dict[str, object]] = []
    cells: list[list[str]] = []
    for name, (_, moved) in entries.items():
        timing, peer = Timing.of(times[name]), ratios(times[PEER], times[name])
        same = moved > entries[FLOOR][1]
        floor = ratios(times[FLOOR], times[name]).median if same else moved / bandwidth / timing.median
        rows.append(
            {
                "name": name,
                "times_torch_topk": round(peer.median, 2),
                "times_torch_topk_quartiles": [round(peer.low, 2), round(peer.high, 2)],
                "fraction_of_floor": round(floor, 3) if moved else None,
                **timing.as_dict(),
            }
        )
        cells.append(
            [
                name,
                f"{timing.median * 1e3:.2f}",
                f"{100 * timing.spread:.0f} %",
                f"{peer.median:.1f}",
                f"{peer.low:.1f} to {peer.high:.1f}",
                f"{100 * floor:.0f} %" if moved else "",
            ]
        )
    columns = ["", "ms", "spread", "x torch.topk", "quartiles", "of the floor"]
    output.table(f"{options.kernel}, one core, {options.numel} elements of fp32", columns, cells)
    ours = next(row for row in rows if "with residual" in str(row["name"]))
    met = float(str(ours["times_torch_topk"])) >= TARGET
    print(
        f"{ours['name']}: {ours['times_torch_topk']}x torch.topk; at least {TARGET:g}: {'PASS' if met else 'MISS'}"
    )
    if options.json is not None:
        settings |= {
            "numel": options.numel,
            "ratio": options.ratio,
            "load": os.getloadavg(),
            "target": TARGET,
        }
        print(output.write("topk", {**settings, "rows": rows}, options.json or None))


if __name__ == "__main__":
    main()
