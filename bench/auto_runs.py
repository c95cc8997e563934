"""Train repeatedly with "auto" and compare what it chose with plain DDP, in pairs of steps of one process.

python -m bench.auto_runs [--links memory 1 10] [--batch 4 256] [--runs 20] [--minutes M] [--width W] [--json FILE]

Every run builds a new model, trains it with `compress(model, "auto")` until that has chosen, and then takes steps in
pairs with a twin under DDP without a hook, in random order. A run is lost if its choice takes more than 2 % longer in
the median of the first half of the pairs, and of the second. "1" and "10" are links of so many Gbit/s between two
network namespaces (root, iproute2), "memory" is one host. The table goes to docs/results/ddp.md (`python -m
bench.pages`). The exit status is 1 if more runs are lost than 1 % and its sampling error allow.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtcomm.ddp
from bench.common import machine, output, pages
from bench.common.pool import Pool
from dtcomm.measure import netns

LAYERS = 3
LOST_RATIO, LOST_LIMIT = 1.02, 0.01
MOST_STEPS = 800  # until "auto" has chosen
SETTLING_STEPS = 40  # residuals of parameters that are not compressed any more are sent within 32 steps


class TrainingRank:
    """A rank that trains models of its own, one run at a time."""

    def __init__(self, rank: int, ranks: int, store: str, namespaces: list[str]) -> None:
        torch.set_num_threads(
            1
        )  # not bound to a core, on which Gloo's caller and its I/O thread would share one
        if namespaces:
            netns.init_process_group(rank, ranks, store, namespaces)
        else:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self.rank = rank

    def run(self, seed: int, width: int, batch: int, pairs: int) -> dict[str, Any]:
        """Train until "auto" has chosen; return its choice, the steps it took, and the times of pairs of steps."""
        chosen, plain = self._model(seed, width), self._model(seed, width)
        state = dtcomm.ddp.compress(chosen, "auto", sample_every=0)
        inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(self.rank))
        choice, steps = "", 0
        while steps < MOST_STEPS and not choice:
            self._step(chosen, inputs)
            steps += 1
            if state.events:
                choice = state.events[-1].action
        for _ in range(SETTLING_STEPS):
            self._step(chosen, inputs)
        for _ in range(3):  # DDP rebuilds its buckets after the first
            self._step(plain, inputs)
        order, times = random.Random(seed), []
        for _ in range(pairs):
            both = [chosen, plain]
            order.shuffle(both)
            took = {id(model): self._step(model, inputs) for model in both}
            times.append((took[id(chosen)], took[id(plain)]))
        return {"choice": choice, "steps": steps, "times": times}

    @staticmethod
    def _model(seed: int, width: int) -> DistributedDataParallel:
        torch.manual_seed(seed)
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        return DistributedDataParallel(torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=4)

    @staticmethod
    def _step(model: DistributedDataParallel, inputs: torch.Tensor) -> float:
        model.zero_grad(set_to_none=False)
        start = time.perf_counter()
        model(inputs).square().mean().backward()
        return time.perf_counter() - start

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


def ratios(results: list[dict[str, Any]]) -> list[float]:
    """Return the choice's time over plain DDP's in every pair, of the slower rank each."""
    return [
        max(own[0] for own in pair) / max(own[1] for own in pair)
        for pair in zip(*(result["times"] for result in results), strict=True)
    ]


def is_lost(pair_ratios: list[float]) -> bool:
    """Return whether the choice is slower than plain DDP in both halves of the pairs."""
    half = len(pair_ratios) // 2
    return all(statistics.median(part) > LOST_RATIO for part in (pair_ratios[:half], pair_ratios[half:]))


@contextlib.contextmanager
def namespaces_of(link: str) -> Iterator[list[str]]:
    """Yield the namespaces of a link; none for ranks that share memory."""
    if link == "memory":
        yield []
    else:
        with netns.two_hosts(float(link)) as namespaces:
            yield namespaces


def measure(
    link: str, batch: int, width: int, runs: int, pairs: int, seconds: float, first: int
) -> dict[str, Any]:
    """Return the row of one link and batch size; start no run after so many seconds."""
    medians, lost, steps, choices = [], 0, [], Counter[str]()
    begin = time.monotonic()
    with (
        namespaces_of(link) as namespaces,
        TemporaryDirectory() as folder,
        Pool(TrainingRank, 2, timeout=600, store=str(Path(folder) / "store"), namespaces=namespaces) as pool,
    ):
        for number in range(runs):
            if medians and time.monotonic() - begin > seconds:
                break
            results = pool.call("run", seed=first + number, width=width, batch=batch, pairs=pairs)
            found = ratios(results)
            choice = results[0]["choice"] or "still measuring"
            medians.append(statistics.median(found))
            steps.append(results[0]["steps"])
            choices[choice] += 1
            lost += is_lost(found)
            print(
                f"{link}, batch {batch}, run {number + 1} of {runs}: {choice} after {steps[-1]} steps, "
                f"{medians[-1]:.2f} of plain DDP's time{', lost' if is_lost(found) else ''}",
                file=sys.stderr,
                flush=True,
            )
    low, middle, high = min(medians), statistics.median(medians), max(medians)
    limit = LOST_LIMIT * len(medians) + 3 * math.sqrt(LOST_LIMIT * len(medians))
    return {
        "link": link,
        "batch": batch,
        "runs": len(medians),
        "lost": lost,
        "time": round(middle, 3),
        "time_range": [round(low, 3), round(high, 3)],
        "median_steps": statistics.median(steps),
        "choices": dict(choices.most_common()),
        "verdict": "PASS" if lost <= limit else "MISS",
    }


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    low, high = row["time_range"]
    link = "shared memory" if row["link"] == "memory" else f"{row['link']} Gbit/s"
    return [
        f"{link}, batch {row['batch']}",
        f"{row['runs']}",
        f"{row['lost']}",
        f"{row['time']:.2f}, {low:.2f}–{high:.2f}",
        f"{row['median_steps']:.0f}",
        ", ".join(f"{choice}: {number}" for choice, number in row["choices"].items()),
    ]


COLUMNS = ["link", "runs", "lost", "time of a step over plain DDP's", "steps until chosen", "choices"]


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/ddp.md."""
    return pages.markdown(COLUMNS, [cells(row) for row in result["rows"]])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, print the table, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", choices=["memory", "1", "10"], default=["memory", "1", "10"])
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--runs", type=int, default=20, help="of each link and batch size")
    parser.add_argument("--pairs", type=int, default=60, help="of steps after the choice")
    parser.add_argument("--minutes", type=float, default=10, help="for each link and batch size, at most")
    parser.add_argument("--width", type=int, default=1024, help="of the model's three layers")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--json", help="where to write instead of bench/results/auto_runs.json")
    options = parser.parse_args(arguments)
    if set(options.links) != {"memory"} and (reason := netns.why_unavailable()):
        sys.exit(f"bench.auto_runs: {reason}")
    rows = [
        measure(link, batch, options.width, options.runs, options.pairs, options.minutes * 60, options.seed)
        for link in options.links
        for batch in options.batch
    ]
    output.table(
        f"auto beside plain DDP, {LAYERS * options.width**2 / 1e6:.1f} M parameters, 2 ranks",
        [*COLUMNS, "verdict"],
        [[*cells(row), row["verdict"]] for row in rows],
    )
    verdict = "MISS" if any(row["verdict"] == "MISS" for row in rows) else "PASS"
    result = {
        "machine": machine.describe(),
        "load": os.getloadavg(),
        "width": options.width,
        "pairs": options.pairs,
        "rows": rows,
        "verdict": verdict,
    }
    print(output.write("auto_runs", result, options.json), verdict)
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
