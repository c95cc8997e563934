"""A DDP step over a slow link: dtcomm's schemes beside plain Gloo and torch's own hooks, in turn, in one run.

python -m bench.slow_link [--gbit 1 10] [--batch 4 256] [--only NAMES] [--repetitions N] [--json FILE]

Two ranks in two network namespaces joined by a link of a given rate (needs root and iproute2). The model is a wide
MLP of 25.2 M parameters, 101 MB of gradients a step; "compute" is the step without communication.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.common import machine, output
from bench.common.pool import Pool
from bench.common.stats import Timing
from dtcomm.testing import hosts

WIDTH, LAYERS = 2896, 3
TORCH = ("torch: no hook", "torch: fp16", "torch: powersgd 1", "torch: powersgd 4")
OURS = {
    "none": "none",
    "fp16": "fp16",
    "int8": "int8",
    "int4": "int4",
    "topk 1%": "topk:ratio=0.01",
    "powersgd 1": "powersgd:rank=1",
    "powersgd 4": "powersgd:rank=4",
    "powersgd 4 alternating": "powersgd:rank=4,alternate=true",
}
# How many times faster than no hook, by (Gbit/s, batch).
TARGETS: dict[str, dict[tuple[float, int], float]] = {
    "fp16": {(1, 4): 1.92, (1, 256): 1.5, (10, 4): 1.2, (10, 256): 0.98},
    "int8": {(1, 4): 2.8, (1, 256): 1.9, (10, 4): 1.25, (10, 256): 0.98},
    "int4": {(1, 4): 3.9, (1, 256): 2.1, (10, 4): 1.3, (10, 256): 0.98},
    "topk 1%": {(1, 4): 7, (1, 256): 2.2, (10, 4): 1.35, (10, 256): 0.95},
    "powersgd 1": {(1, 4): 6.5, (1, 256): 2.2, (10, 4): 1.35, (10, 256): 0.95},
    "powersgd 4": {(1, 4): 5.5, (1, 256): 2, (10, 4): 1.1, (10, 256): 0.9},
}


class LinkRank:
    """One rank in a namespace of its own; models are built one at a time, as gigabytes of them would not fit."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        hosts.join(rank, ranks, rendezvous, namespaces)
        self.rank = rank
        self.models: dict[str, torch.nn.Module] = {}

    def build(self, name: str) -> str:
        """Makes the model that `name` trains; returns what carries its gradients."""
        import dtcomm.ddp

        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers[:-1])
        if name == "compute":
            self.models[name] = net
            return ""
        # torch's PowerSGD chains collectives of several buckets in any order: it wants a single one.
        one_bucket = name.startswith("torch: powersgd")
        model = DistributedDataParallel(net, bucket_cap_mb=400 if one_bucket else 25)
        if name == "torch: fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif one_bucket:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=int(name[-1]), start_powerSGD_iter=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name in OURS:
            dtcomm.ddp.compress(model, OURS[name], sample_every=0)
        self.models[name] = model
        return str(dtcomm.collectives.info()["runtime"]) if name in OURS else "torch"

    def step(self, name: str, batch: int) -> float:
        """Seconds of a forward and a backward pass."""
        model = self.models[name]
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(self.rank))
        model.zero_grad(set_to_none=False)
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        return time.perf_counter() - start

    def drop(self, name: str) -> None:
        """Frees the model."""
        del self.models[name]

    def close(self) -> None:
        """Leaves the group."""
        self.models.clear()
        dist.destroy_process_group()


def measure(gbit: float, batches: list[int], names: list[str], repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds a step of the slower rank: one row a batch size, contestants by turns."""
    times: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in names} for batch in batches}
    runtimes: dict[str, str] = {}
    with hosts.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
        with Pool(
            LinkRank, 2, timeout=300, rendezvous=str(Path(folder) / "meet"), namespaces=namespaces
        ) as pool:
            # Everybody's models at once are 5 GB a rank; a contestant's turn comes in every repetition.
            for name in names:
                runtimes[name] = pool.call("build", name=name)[0]
                for _ in range(3):  # DDP rebuilds its buckets after the first
                    pool.call("step", name=name, batch=batches[0])
            for _ in range(repetitions):
                for batch in batches:
                    for name in names:
                        times[batch][name].append(max(pool.call("step", name=name, batch=batch)))
    rows = []
    for batch in batches:
        base = Timing.of(times[batch]["torch: no hook"]).median
        for name in names:
            timing = Timing.of(times[batch][name])
            target = TARGETS.get(name, {}).get((gbit, batch))
            rows.append(
                {
                    "gbit": gbit,
                    "batch": batch,
                    "name": name,
                    "runtime": runtimes[name],
                    "ms": round(timing.median * 1e3, 1),
                    "faster": round(base / timing.median, 3),
                    "target": target,
                    "verdict": "" if target is None else "PASS" if base / timing.median >= target else "MISS",
                    **timing.as_dict(),
                }
            )
    return rows


def show(gbit: float, batch: int, rows: list[dict[str, Any]]) -> None:
    """One table."""
    lines = [
        [
            row["name"],
            f"{row['ms']:,.0f}",
            f"{row['faster']:.2f}x",
            "" if row["target"] is None else f"{row['target']:g}x",
            row["verdict"],
        ]
        for row in rows
        if (row["gbit"], row["batch"]) == (gbit, batch)
    ]
    output.table(
        f"a DDP step of {LAYERS * WIDTH * WIDTH / 1e6:.1f} M parameters, 2 ranks, {gbit:g} Gbit/s, batch {batch}",
        ["", "ms", "faster", "target", "verdict"],
        lines,
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints, writes the file; returns what it wrote."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--only", nargs="+", choices=list(OURS), default=list(OURS), help="of ours")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", help="where to write instead of bench/results/slow_link.json")
    options = parser.parse_args(arguments)
    if why := hosts.available():
        sys.exit(f"bench.slow_link: {why}")
    names = ["compute", *TORCH, *options.only]
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        rows += measure(gbit, options.batch, names, options.repetitions)
        for batch in options.batch:
            show(gbit, batch, rows)
    result = {"machine": machine.describe(), "load": os.getloadavg(), "rows": rows}
    print(output.write("slow_link", result, options.json))
    return result


if __name__ == "__main__":
    main()
