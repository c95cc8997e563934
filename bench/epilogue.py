"""Compare the fused epilogue of a summed activation with the same operations in torch after a decode.

python -m bench.epilogue [--codecs int8 int4] [--tokens 1 16 512] [--features 4096] [--dtypes bfloat16] [--json FILE]

One thread decodes and applies bias, residual stream and RMS norm; both contestants write the sum and the norm, and take
turns. A ratio above 1 means that the fused pass is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from bench.common import machine, output
from bench.common.stats import Timing, iterations
from bench.common.turns import in_turn
from dtcomm.kernels import ops
from dtcomm.kernels.epilogue import epilogue

EPS = 1e-6


def contestants(spec: str, tokens: int, features: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Return the fused and the separate version, on the same payload and buffers."""
    x, residual = (torch.randn(tokens, features).to(dtype) for _ in range(2))
    bias, weight = (torch.randn(features).to(dtype) for _ in range(2))
    payload = ops.encode(spec, x)
    out, normed = torch.empty_like(x), torch.empty_like(x)

    def together() -> None:
        runs = [(payload, x.numel())]
        epilogue(spec, runs, out, bias=bias, residual=residual, weight=weight, eps=EPS, norm_out=normed)

    def apart() -> None:
        ops.decode(spec, payload, x.numel(), dtype, out.view(-1))
        torch.add(out, bias, out=out)
        torch.add(out, residual, out=out)
        F.rms_norm(out, (features,), weight, EPS)

    return {"one pass": together, "apart": apart}


def measure(calls: dict[str, Callable[[], None]], repetitions: int) -> dict[str, Timing]:
    """Return the timing of a call of each contestant; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = {name: iterations(_seconds(call, 3), 0.02) for name, call in calls.items()}
    for repetition in range(repetitions):
        for name, call in in_turn(list(calls.items()), repetition):
            times[name].append(_seconds(call, rounds[name]))
    return {name: Timing.of(series) for name, series in times.items()}


def _seconds(call: Callable[[], None], iters: int) -> float:
    start = time.perf_counter()
    for _ in range(iters):
        call()
    return (time.perf_counter() - start) / iters


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 512, 4096])
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", help="where to write instead of bench/results/epilogue.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, lines = [], []
    for name in options.dtypes:
        for spec in options.codecs:
            for tokens in options.tokens:
                measured = measure(
                    contestants(spec, tokens, options.features, getattr(torch, name)), options.repetitions
                )
                ratio = measured["apart"].median / measured["one pass"].median
                timings = {contestant: timing.as_dict() for contestant, timing in measured.items()}
                rows.append(
                    {"dtype": name, "codec": spec, "tokens": tokens, "ratio": round(ratio, 3), **timings}
                )
                contestant = [
                    output.microseconds(measured[contestant].median) for contestant in ("one pass", "apart")
                ]
                lines.append([f"{name} {spec}, {tokens} tokens", *contestant, f"{ratio:.2f}x"])
    output.table(f"sums of {options.features} features", ["", "one pass us", "apart us", "faster"], lines)
    result = {
        "machine": machine.describe(),
        "features": options.features,
        "load": machine.load(),
        "rows": rows,
    }
    print(output.write("epilogue", result, options.json))
    return result


if __name__ == "__main__":
    main()
