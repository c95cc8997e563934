"""Compare a DDP step over a slow link: dtcomm's schemes, plain Gloo and torch's hooks, in one run.

python -m bench.slow_link [--gbit 1 10] [--batch 4 256] [--only NAMES] [--seconds S] [--json FILE]

Two ranks run in two network namespaces connected by a link of the given rate (needs root and iproute2). The model is a
wide MLP of 25.2 M parameters, 101 MB of gradients per step; "compute" is the step without communication. "auto" chooses
from none, fp16, int8 and int4, "auto, all" also from the other schemes; their choices are printed. dtcomm's schemes use
error feedback, except "no feedback". Contestants take turns of two steps; the second is timed, since in training a step
follows one of the same model too. It takes about 7 minutes for each rate.
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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.common import conditions, machine, output, pages
from bench.common.pool import Pool
from bench.common.stats import Timing
from bench.common.turns import in_turn
from bench.training import torch_hooks
from dtcomm.measure import netns

WIDTH, LAYERS = 2896, 3
TORCH_HOOKS = {f"torch: {name}": name for name in torch_hooks.HOOKS}  # of 16 bits
TORCH = ("torch: no hook", *TORCH_HOOKS, "torch: powersgd 1", "torch: powersgd 4")
OURS = {
    "none": "none",
    "fp16": "fp16",
    "fp16, no feedback": "fp16",
    "bf16, stochastic": "bf16:round=stochastic",
    "int8": "int8",
    "int4": "int4",
    "topk 1%": "topk:ratio=0.01",
    "powersgd 1": "powersgd:rank=1",
    "powersgd 4": "powersgd:rank=4",
    "powersgd 4 alternating": "powersgd:rank=4,alternate=true",
}
# The candidates of "auto"; None: its default.
AUTO: dict[str, list[str] | None] = {
    "auto": None,
    "auto, all": ["fp16", "int8", "int4", "topk:ratio=0.01", "powersgd:rank=1", "powersgd:rank=4"],
}
AMONG = {
    "auto": ("none", "fp16", "int8", "int4"),
    "auto, all": tuple(name for name in OURS if "no feedback" not in name),
}
# How many times faster than no hook, by (Gbit/s, batch).
TARGETS: dict[str, dict[tuple[float, int], float]] = {
    "fp16": {(1, 4): 1.92, (1, 256): 1.5, (10, 4): 1.2, (10, 256): 0.98},
    "fp16, no feedback": {(1, 4): 1.92, (1, 256): 1.5, (10, 4): 1.2, (10, 256): 0.98},
    "int8": {(1, 4): 2.8, (1, 256): 1.9, (10, 4): 1.25, (10, 256): 0.98},
    "int4": {(1, 4): 3.9, (1, 256): 2.1, (10, 4): 1.3, (10, 256): 0.98},
    "topk 1%": {(1, 4): 7, (1, 256): 2.2, (10, 4): 1.35, (10, 256): 0.95},
    "powersgd 1": {(1, 4): 6.5, (1, 256): 2.2, (10, 4): 1.35, (10, 256): 0.95},
    "powersgd 4": {(1, 4): 5.5, (1, 256): 2, (10, 4): 1.1, (10, 256): 0.9},
}


DEFAULT_NAMES = [name for name in (*OURS, *AUTO) if "alternating" not in name]  # all together need 13 GB


class LinkRank:
    """A rank in its own namespace; models are built one at a time to limit the memory of their construction."""

    def __init__(self, rank: int, ranks: int, store_file: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, store_file, namespaces)
        self.rank = rank
        self.models: dict[str, torch.nn.Module] = {}
        self.states: dict[str, Any] = {}

    def build(self, name: str) -> str:
        """Build the model called `name`; return the runtime that carries its gradients."""
        import dtcomm.ddp

        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers[:-1])
        if name == "compute":
            self.models[name] = net
            return ""
        # torch's PowerSGD issues the collectives of several buckets in any order: it needs a single bucket.
        one_bucket = name.startswith("torch: powersgd")
        model = DistributedDataParallel(net, bucket_cap_mb=400 if one_bucket else 25)
        self.models[name] = model
        if name in TORCH_HOOKS:
            model.register_comm_hook(None, torch_hooks.ddp_hook(TORCH_HOOKS[name]))
        elif one_bucket:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=int(name[-1]), start_powerSGD_iter=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name in OURS:
            # torch's fp16 hook has no feedback; errors are a few millionths, and a residual is 101 MB more to read.
            feedback = "no feedback" not in name
            dtcomm.ddp.compress(model, OURS[name], sample_every=0, feedback=feedback)
        elif kind(name) in AUTO:
            candidates = AUTO[kind(name)]
            self.states[name] = dtcomm.ddp.compress(model, "auto", sample_every=0, candidates=candidates)
        else:
            return "torch"
        return str(dtcomm.info()["runtime"])

    def step(self, name: str, batch: int) -> float:
        """Return the seconds of a forward and a backward pass."""
        model = self.models[name]
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(self.rank))
        model.zero_grad(set_to_none=False)
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        return time.perf_counter() - start

    def chosen(self, name: str) -> tuple[str, bool]:
        """Return what "auto" has chosen, "" before, and whether residuals of its trials are still being sent."""
        events = self.states[name].events
        chosen = events[-1].action if events else ""
        return chosen, chosen in ("none", "plain DDP") and self.states[name].report().residual_bytes > 0

    def reason(self, name: str) -> str:
        """Return the reason for auto's choice."""
        return str(self.states[name].events[-1])

    def close(self) -> None:
        """Destroy the process group."""
        self.models.clear()
        dist.destroy_process_group()


def kind(name: str) -> str:
    """Return a contestant's name without the batch size of its model."""
    return name.partition(" @")[0]


def for_batch(name: str, batch: int) -> str:
    """Return the name of a contestant's model: "auto" has one for each batch size, because it chooses by that."""
    return f"{name} @{batch}" if name in AUTO else name


def prepare(pool: Pool, gbit: float, names: list[str], batches: list[int]) -> dict[str, dict[str, str]]:
    """Build and warm up all models; return by name the runtime of the gradients, and auto's choice with its reason."""
    facts: dict[str, dict[str, str]] = {}
    for batch in batches:
        for name in names:
            model = for_batch(name, batch)
            if model in facts:
                continue
            print(f"{gbit:g} Gbit/s: {model}", file=sys.stderr, flush=True)
            facts[model] = {"runtime": pool.call("build", name=model)[0]}
            for _ in range(3):  # DDP rebuilds its buckets after the first
                pool.call("step", name=model, batch=batch)
            if name in AUTO:
                for _ in range(600):  # where gains are as large as the noise, it takes hundreds of steps
                    chosen, has_residual = pool.call("chosen", name=model)[0]
                    if chosen and not has_residual:
                        facts[model] |= {"chosen": chosen, "reason": pool.call("reason", name=model)[0]}
                        print(facts[model]["reason"], file=sys.stderr, flush=True)
                        break
                    pool.call("step", name=model, batch=batch)
    return facts


def measure(
    gbit: float, batches: list[int], names: list[str], repetitions: int, seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each batch size and contestant, with the slower rank's times; contestants take turns.

    ``seconds`` limits the repetitions, once there are as many as a kept result needs; preparation does not count.
    """
    times: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in names} for batch in batches}
    with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
        with Pool(
            LinkRank, 2, timeout=300, store_file=str(Path(folder) / "meet"), namespaces=namespaces
        ) as pool:
            facts = prepare(pool, gbit, names, batches)
            begin, last = time.monotonic(), 0.0
            for repetition in range(repetitions):
                if repetition >= conditions.FEWEST_REPETITIONS and time.monotonic() - begin + last > seconds:
                    break
                last = -time.monotonic()
                for batch in batches:
                    for name in in_turn(names, repetition):
                        for _ in range(2):
                            took = pool.call("step", name=for_batch(name, batch), batch=batch)
                        times[batch][name].append(max(took))
                last += time.monotonic()
    rows = []
    for batch in batches:
        medians = {name: Timing.of(times[batch][name]).median for name in names}
        base = medians["torch: no hook"]
        for name in names:
            timing = Timing.of(times[batch][name])
            least = target(gbit, batch, name, medians)
            faster = base / timing.median
            rows.append(
                {
                    "gbit": gbit,
                    "batch": batch,
                    "name": name,
                    **facts[for_batch(name, batch)],
                    "ms": round(timing.median * 1e3, 1),
                    "faster": round(faster, 3),
                    "target": None if least is None else round(least, 3),
                    "verdict": "" if least is None else "PASS" if faster >= least else "MISS",
                    **timing.as_dict(),
                }
            )
    return rows


def target(gbit: float, batch: int, name: str, medians: dict[str, float]) -> float | None:
    """Return the target for how many times faster than no hook a contestant is.

    For "auto" it is 95 % of the best speed-up among its candidates, and at least that of no hook.
    """
    if name not in AUTO:
        return TARGETS.get(name, {}).get((gbit, batch))
    base = medians["torch: no hook"]
    best = max((base / medians[candidate] for candidate in AMONG[name] if candidate in medians), default=0.0)
    return 0.98 if best < 1 else max(0.98, 0.95 * best)


def show(gbit: float, batch: int, rows: list[dict[str, Any]]) -> None:
    """Print the table of one rate and batch size."""
    lines = [
        [
            row["name"] + (f": {row['chosen']}" if "chosen" in row else ""),
            f"{row['ms']:,.0f}",
            f"{row['faster']:.2f}x",
            "" if row["target"] is None else f"{row['target']:.3g}x",
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


def speedup(row: dict[str, Any]) -> str:
    """Return ``1.31× [1.28–1.37]``: the median over runs, and their range if there are several."""
    return f"{row['faster']:.2f}×{pages.spread(row, 'faster', '{:.2f}'.format)}"


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/ddp.md: milliseconds of a step and the speed-up over DDP without a hook."""
    rows = result["rows"]
    cases = sorted({(row["gbit"], row["batch"]) for row in rows})
    rows_by_case = pages.steps_by_case(rows)
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = []
    for name in names:
        cells = []
        for case in cases:
            same = rows_by_case.get((*case, name), [])
            cells.append(
                "; ".join(
                    f"{row['ms']:.0f} ({speedup(row)}{': ' + row['chosen'] if len(same) > 1 else ''})"
                    for row in same
                )
            )
        lines.append([name, *cells])
    return pages.markdown(["ms a step", *(f"{gbit:g} Gbit/s, batch {batch}" for gbit, batch in cases)], lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--only", nargs="+", choices=[*OURS, *AUTO], default=DEFAULT_NAMES, help="of ours")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=180, help="of repetitions, for a rate")
    parser.add_argument("--json", help="where to write instead of bench/results/slow_link.json")
    options = parser.parse_args(arguments)
    if reason := netns.why_unavailable():
        sys.exit(f"bench.slow_link: {reason}")
    names = ["compute", *TORCH, *options.only]
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        rows += measure(gbit, options.batch, names, options.repetitions, options.seconds)
        for batch in options.batch:
            show(gbit, batch, rows)
    result = {"machine": machine.describe(), "load": os.getloadavg(), "rows": rows}
    print(output.write("slow_link", result, options.json))
    return result


if __name__ == "__main__":
    main()
