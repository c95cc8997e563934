"""Which settings of the hand-written all-reduce win on this machine, size by size, beside the floor.

python -m bench.yardstick_sweep [--ranks 2] [--sizes BYTES ...] [--quick]

Adds to bench/results/yardstick-sweep.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from functools import partial
from pathlib import Path

from bench.common import machine, native, output
from bench.common.native import Segment, Tuning, tuning
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.yard_rank import YardRank

KB, MB = 1 << 10, 1 << 20
SIZES = [KB, 64 * KB, MB, 16 * MB, 64 * MB, 256 * MB]
RING = 8 * MB


def candidates(size: int, ranks: int) -> dict[str, tuple[int, Tuning]]:
    """What to try at ``size`` bytes, by a readable name."""
    found = {"in segment, direct": (native.DIRECT, tuning(ranks=ranks))}
    if size <= native.BOX_BYTES:
        found["one-shot"] = (native.ONE_SHOT, tuning(ranks=ranks))
        found["one-shot nt-stage"] = (native.ONE_SHOT, tuning(ranks=ranks, stream_stage=1))
    if size >= 64 * KB:
        pieces = [piece for piece in (32, 64, 128, 256, 512, 1024) if size // 512 <= piece * KB <= size]
        for piece, slots, stage, slot, result in itertools.product(pieces, (2, 4, 8), (0, 1), (0, 1), (0, 1)):
            if piece * KB * slots > RING or (stage, slot, result) in ((0, 1, 0), (0, 1, 1), (1, 0, 1)):
                continue
            for ahead, behind in ((1, 0), (1, 1), (2, 1)):
                if ahead + behind >= slots or (slots > 2 and behind == 0):
                    continue
                streams = "".join(
                    f" nt-{n}"
                    for n, on in zip(("stage", "slot", "result"), (stage, slot, result), strict=True)
                    if on
                )
                name = f"two-shot {piece} KB x {slots} lag {ahead}+{behind}{streams}"
                settings = tuning(
                    piece * KB,
                    slots,
                    ranks=ranks,
                    ahead=ahead,
                    behind=behind,
                    stream_stage=stage,
                    stream_slot=slot,
                    stream_result=result,
                )
                found[name] = (native.TWO_SHOT, settings)
    found["floor: copy"] = (native.COPY, tuning(ranks=ranks))
    found["floor: non-temporal copy"] = (native.STREAMING_COPY, tuning(ranks=ranks))
    found["floor: in place"] = (native.UPDATE, tuning(ranks=ranks))
    return found


def sweep(pool: Pool, size: int, ranks: int, budget: float, rounds: int) -> list[dict[str, object]]:
    """Every candidate at ``size``, fastest first; one quick round for all, then more for the ten best."""
    numel = size // 4
    named = candidates(size, ranks)
    times: dict[str, list[float]] = {name: [] for name in named}

    def once(name: str, iters: int) -> None:
        algorithm, settings = named[name]
        seconds = pool.call(
            "measure", algorithm=algorithm, numel=numel, settings=settings.as_dict(), warm=1, iters=iters
        )
        times[name].append(max(seconds))

    for name in named:
        once(name, 1)
    iters = {name: iterations(times[name][0], budget) for name in named}
    for name in named:
        times[name].clear()
        once(name, iters[name])
    kept = sorted(named, key=lambda name: times[name][0])[:10]
    kept += [name for name in named if name not in kept and not name.startswith("two-shot")]
    for _ in range(rounds - 1):
        for name in kept:
            once(name, iters[name])
    rows: list[dict[str, object]] = [
        {"name": name, **Timing.of(times[name]).as_dict(), "settings": named[name][1].as_dict()}
        for name in named
    ]
    return sorted(rows, key=lambda row: float(str(row["median_us"])))


def merge(path: Path, fresh: list[dict[str, object]]) -> list[dict[str, object]]:
    """``fresh`` with what ``path`` holds for other sizes and other placements of the cores: the machine moves
    between them unasked, so that one run seldom sees them all."""
    old = json.loads(path.read_text(encoding="utf-8"))["sizes"] if path.exists() else []
    seen = {(entry["bytes"], entry["placement"]) for entry in fresh}
    both = fresh + [entry for entry in old if (entry["bytes"], entry["placement"]) not in seen]
    return sorted(both, key=lambda entry: (str(entry["placement"]), int(str(entry["bytes"]))))


def notable(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The fastest dozen and whatever has no settings to choose."""
    return [row for i, row in enumerate(rows) if i < 12 or not str(row["name"]).startswith("two-shot")]


def main() -> None:
    """Sweeps, prints the winners, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", help="where to write instead of bench/results")
    options = parser.parse_args()
    sizes = sorted(options.sizes)
    budget, rounds = (0.01, 3) if options.quick else (0.03, 7)
    segment = Segment.create(options.ranks, RING, sizes[-1])
    results = []
    with Pool(YardRank, options.ranks, address=segment.address, largest=sizes[-1]) as pool:
        for size in sizes:
            rows, conditions = machine.steady(partial(sweep, pool, size, options.ranks, budget, rounds))
            results.append({"bytes": size, **conditions, "candidates": notable(rows)})
            output.table(
                f"{output.size_name(size)}, {options.ranks} ranks, {conditions['round_trip_ns']} ns",
                ["how", "median us", "quartiles us", "best us"],
                [
                    [str(row[k]) for k in ("name", "median_us", "quartiles_us", "best_us")]
                    for i, row in enumerate(notable(rows))
                    if i < 6 or not str(row["name"]).startswith("two-shot")
                ],
            )
    segment.close()
    name = "yardstick-sweep" if options.ranks == 2 else f"yardstick-sweep-{options.ranks}-ranks"
    path = Path(options.json) if options.json else output.RESULTS / f"{name}.json"
    merged = merge(path, results)
    print(
        output.write(
            name, {"machine": machine.describe(), "ranks": options.ranks, "sizes": merged}, str(path)
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
