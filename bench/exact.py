"""Compare exact sums with uncompressed ones and a bf16 wire: time and bytes of each collective, and of a layer.

python -m bench.exact [--ranks 2 4] [--sizes 64K 1M 16M] [--dtypes float32 bfloat16] [--tokens 1 64 512]
                      [--repeat 5] [--quick] [--json FILE]

Averages of normally distributed numbers on one host. "bytes" are what a rank sends divided by what it sends with codec
none; those of exact:rounded=true are measured, without its ranges of bits (1/64 of the bytes of fp32). The layer is a
row-parallel one of 1024 by 1024 features, forward only; "fix_terms" has the same bits on 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.common import harness, report
from bench.common.ranks import contestant, rank_pool

KB, MB = 1 << 10, 1 << 20
CODECS = ("none", "bf16", "exact", "exact:rounded=true")
FIXED = "fix_terms"
WIDTH = 1024


def make_collective(
    rank: int, ranks: int, name: str, *, collective: str, codec: str, numel: int, dtype: str
) -> Callable[[], object]:
    """Return a call of a collective."""
    call = _call(rank, ranks, collective, codec, numel, dtype)
    return lambda: call(False)


def bytes_sent(rank: int, ranks: int, **case: Any) -> int:
    """Return the bytes that this rank sends in a call."""
    work = _call(rank, ranks, **case)(True)
    work.wait()
    return int(work.wire_bytes)


def _call(
    rank: int, ranks: int, collective: str, codec: str, numel: int, dtype: str
) -> Callable[[bool], Any]:
    import dtcomm

    numel -= numel % ranks
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))
    if collective == "all_reduce":
        return lambda later: dtcomm.all_reduce(x, "avg", codec=codec, async_op=later)
    if collective == "reduce":
        return lambda later: dtcomm.reduce(x, 0, "avg", codec=codec, async_op=later)
    part = torch.empty(numel // ranks, dtype=x.dtype)
    return lambda later: dtcomm.reduce_scatter(part, x, "avg", codec=codec, async_op=later)


def make_layer(rank: int, ranks: int, name: str, *, codec: str, tokens: int) -> Callable[[], object]:
    """Return a forward pass."""
    from dtcomm.extensions.extras import fix_terms
    from dtcomm.tp import RowParallelLinear

    torch.manual_seed(0)
    layer = RowParallelLinear(WIDTH, WIDTH, codec="none" if codec == FIXED else codec, latency=False)
    if codec == FIXED:
        fix_terms(layer)
    x = torch.randn(tokens, WIDTH // ranks)

    @torch.no_grad()
    def forward() -> object:
        return layer(x)

    return forward


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=report.parse_size, nargs="*", default=[64 * KB, MB, 16 * MB])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 512])
    options = harness.parse(parser, arguments)
    if options.quick:
        options.ranks, options.sizes, options.tokens = (
            options.ranks[:1],
            options.sizes[:1],
            options.tokens[:1],
        )
    results = harness.Results(options)
    for ranks in options.ranks:
        with rank_pool(ranks) as pool:
            for collective in ("all_reduce", "reduce", "reduce_scatter"):
                for dtype in options.dtypes:
                    for size in options.sizes:
                        pool.call("forget")
                        numel = size // getattr(torch, dtype).itemsize
                        case = {"collective": collective, "numel": numel, "dtype": dtype}
                        measures, sent = {}, {}
                        for codec in CODECS:
                            of_codec = {**case, "codec": codec}
                            measures[codec] = contestant(
                                pool, codec, make_collective, settle=True, **of_codec
                            )
                            sent[codec] = max(pool.call("run", function=bytes_sent, arguments=of_codec))
                        extra = {codec: {"bytes": f"{sent[codec] / sent['none']:.2f}"} for codec in CODECS}
                        title = f"{collective} of {report.size_name(size)}, {ranks} ranks, {dtype}"
                        times = harness.take_turns(measures, options.repeat)
                        results.add(title, {**case, "bytes": size, "ranks": ranks}, times, extra)
            for tokens in options.tokens:
                pool.call("forget")
                layers = {
                    codec: contestant(pool, codec, make_layer, settle=True, codec=codec, tokens=tokens)
                    for codec in (*CODECS, FIXED)
                }
                times = harness.take_turns(layers, options.repeat)
                title = f"row-parallel layer of {WIDTH} x {WIDTH} features, {tokens} tokens, {ranks} ranks"
                results.add(title, {"layer": WIDTH, "tokens": tokens, "ranks": ranks}, times)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
