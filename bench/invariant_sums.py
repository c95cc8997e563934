"""What a row-parallel layer pays for the same bits on every number of ranks.

python -m bench.invariant_sums [--ranks 2] [--tokens 1 64 1024] [--features 1024] [--repetitions 15] [--json FILE]

The layer's forward pass with its sum uncompressed, in codec ``exact``, and in ``exact`` with ``terms=8``, which has the
same bits on 1, 2, 4 and 8 ranks. "alone" is the matrix product without a sum. Contestants take turns; a time is that of
the slower rank. Half a minute.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch

from bench.common import machine, output, pages
from bench.common.stats import Timing, iterations
from dtcomm import tp
from dtcomm.codecs import Exact, codec
from dtcomm.launch.ranks import run_ranks

ALONE = "alone"
CONTESTANTS: dict[str, dict[str, Any]] = {
    "none": {"codec": "none"},
    "exact": {"codec": "exact"},
    "exact, terms=8": {"codec": "exact", "terms": 8},
}


def wire_bytes(spec: str, numel: int) -> int:
    """Return the bytes of ``numel`` sums in fp32; with ``exact`` also those of the exponents on which ranks agree."""
    layout = codec(spec)
    if not isinstance(layout, Exact):
        return layout.wire_bytes(numel)
    return sum(count * dtype.itemsize for count, _, dtype in layout.sum_messages(numel))


@torch.no_grad()
def seconds(
    rank: int, ranks: int, features: int, tokens: list[int], repetitions: int
) -> list[dict[str, Any]]:
    """Return this rank's seconds for each number of tokens, a list for each contestant."""
    torch.set_num_threads(1)
    layers = {
        name: tp.RowParallelLinear(features, features, **options) for name, options in CONTESTANTS.items()
    }
    results = []
    for count in tokens:
        x = torch.randn(count, features // ranks)
        weight = layers["none"].weight
        calls = {name: partial(layer, x) for name, layer in layers.items()}
        calls[ALONE] = partial(torch.nn.functional.linear, x, weight)
        numbers, times = {}, {name: list[float]() for name in calls}
        for name, call in calls.items():
            for _ in range(20):  # plans, and the trials inside the first sums
                call()
            begin = time.perf_counter()
            call()
            guess = torch.tensor([time.perf_counter() - begin])
            torch.distributed.all_reduce(guess, torch.distributed.ReduceOp.MAX)
            numbers[name] = iterations(float(guess), 0.05)
        for _ in range(repetitions):
            for name, call in calls.items():
                torch.distributed.barrier()
                begin = time.perf_counter()
                for _ in range(numbers[name]):
                    call()
                times[name].append((time.perf_counter() - begin) / numbers[name])
        results.append(times)
    return results


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/guides/reproducible-sums.md."""
    tokens = list(dict.fromkeys(row["tokens"] for row in result["rows"]))
    lines = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        rows = {row["tokens"]: row for row in result["rows"] if row["name"] == name}
        cells = [
            f"{output.microseconds(rows[count]['median_us'] / 1e6)}"
            + pages.spread(rows[count], "median_us", lambda us: output.microseconds(us / 1e6))
            for count in tokens
        ]
        wire = rows[tokens[0]]["bytes_per_element"]
        lines.append([name, "–" if wire is None else f"{wire:.3f}", *cells])
    columns = ["sum", "bytes an element", *(f"{count} tokens, µs" for count in tokens)]
    return pages.markdown(columns, lines, aligned=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--features", type=int, default=1024, help="of the layer's input and output")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", help="where to write instead of bench/results/invariant_sums.json")
    options = parser.parse_args(arguments)
    measured = run_ranks(
        seconds, options.ranks, options.features, options.tokens, options.repetitions, timeout=200, fresh=True
    )
    rows = []
    for index, tokens in enumerate(options.tokens):
        for name in (*CONTESTANTS, ALONE):
            slower = [
                max(times) for times in zip(*(by_rank[index][name] for by_rank in measured), strict=True)
            ]
            numel = tokens * options.features
            spec = CONTESTANTS[name]["codec"] if name in CONTESTANTS else None
            wire = None if spec is None else round(wire_bytes(spec, numel) / numel, 4)
            rows.append(
                {"tokens": tokens, "name": name, "bytes_per_element": wire, **Timing.of(slower).as_dict()}
            )
    result = {
        "machine": machine.describe(),
        "ranks": options.ranks,
        "features": options.features,
        "rows": rows,
    }
    print(page(result))
    print(output.write("invariant_sums", result, options.json))
    return result


if __name__ == "__main__":
    main()
