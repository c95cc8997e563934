"""Measure the steps of the workloads of bench.workloads over a slow link, with every method, in one run.

python -m bench.workload_links [--gbit 1 10] [--workloads text …] [--methods int8 …] [--seconds S] [--json FILE]

Two ranks run in two network namespaces connected by a link of the given rate (needs root and iproute2), each with half
of a step's samples; DDP overlaps communication with backward. A step is forward, backward and the optimizer's. "none"
is DDP without a hook, "compute" DDP with torch's hook that sends nothing, so that it has what DDP itself costs; "auto"
chooses from none, fp16, int8 and int4. Contestants take turns of two steps; the second is timed, since in training a
step follows one of the same model too.

docs/results/workloads.md combines these steps with the numbers of steps of bench.workloads, and compares them with what
``dtcomm plan`` predicts from the time of "compute" and the link. Methods without feedback and with a frozen variance
are not measured: their steps take what those of the same method take. It takes about 2 minutes for each workload and
rate.
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
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from bench.common import machine, output
from bench.common.pool import Pool
from bench.common.stats import Timing
from bench.common.turns import in_turn
from bench.training.runs import update
from bench.training.tasks import Unavailable
from bench.training.torch_hooks import ddp_hook
from bench.training.units import VARIANTS, WORKLOADS, Variant
from bench.training.workload import Workload
from dtcomm.measure import netns

RANKS = 2
COMPUTE, AUTO = "compute", "auto"
#: The workers of bench.workloads sum exactly, as in one shot. The default is two shots, which on two ranks send as many
#: bytes and encode the sum once more.
ALGORITHM = "one_shot"
BATCHES = 8  # different ones, made before anything is measured
MOST_STEPS_OF_AUTO = 200  # until it has chosen


def timed(workload: Workload) -> list[str]:
    """Return the variants whose steps are measured."""
    return [
        variant.name
        for variant in VARIANTS.values()
        if variant.applies_to(workload.optimizer) and timed_as(variant) == variant.name
    ]


def timed_as(variant: Variant) -> str:
    """Return the variant whose steps take as long as those of ``variant``: the one with plain error feedback."""
    same = [
        other.name
        for other in VARIANTS.values()
        if other.method is variant.method
        and other.hook == variant.hook
        and other.feedback
        and not other.frozen
    ]
    return same[0] if same else variant.name


class LinkRank:
    """A rank in its own namespace, with a model and an optimizer for each contestant."""

    def __init__(self, rank: int, ranks: int, store_file: str, namespaces: list[str], workload: str) -> None:
        netns.init_process_group(rank, ranks, store_file, namespaces)
        self.workload = WORKLOADS[workload]
        rate = self.workload.rates[self.workload.optimizer]
        self.task = self.workload.task(self.workload.optimizer, rate, ranks)
        self.batches = [self.workload.part(0, step, rank, ranks) for step in range(BATCHES)]
        self.models: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.state: Any = None  # of "auto"
        self.steps: dict[str, int] = {}

    def build(self, name: str) -> None:
        """Build the model of a contestant."""
        import dtcomm.ddp

        torch.manual_seed(0)
        module = self.workload.model()
        parameters = list(module.parameters())
        variant = VARIANTS.get(name)
        momentum = variant is None or not variant.method.sgd
        self.optimizers[name] = self.task.optimizer(parameters, momentum=momentum)
        self.models[name] = module
        self.steps[name] = 0
        model = self.models[name] = DistributedDataParallel(module)
        if name == COMPUTE:
            model.register_comm_hook(None, noop_hook)
        elif name == AUTO:
            self.state = dtcomm.ddp.compress(model, "auto", sample_every=0, algorithm=ALGORITHM)
        elif variant is not None and variant.hook:
            model.register_comm_hook(None, ddp_hook(variant.hook))
        elif variant is not None and variant.method.spec != "none":
            # A hundred steps of warm-up would be measured of DGC, none of which are what it is for.
            spec = variant.method.spec.replace("warmup=100", "warmup=0")
            feedback = variant.method.feedback if variant.feedback else False
            dtcomm.ddp.compress(model, spec, sample_every=0, feedback=feedback, algorithm=ALGORITHM)

    def step(self, name: str) -> float:
        """Return the seconds of a step."""
        model, optimizer, number = self.models[name], self.optimizers[name], self.steps[name]
        self.steps[name] += 1
        optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.backward(self.task.loss(model, self.batches[number % BATCHES]))
        update(self.task, optimizer, list(model.parameters()), number % self.task.steps)
        return time.perf_counter() - start

    def chosen(self) -> str:
        """Return what "auto" has chosen; an empty string before."""
        events = self.state.events
        return str(events[-1].action) if events else ""

    def close(self) -> None:
        """Destroy the process group."""
        self.models.clear()
        dist.destroy_process_group()


def measure(
    gbit: float, workload: Workload, names: list[str], repetitions: int, seconds: float
) -> list[dict[str, Any]]:
    """Return a row for each contestant, with the slower rank's times; ``seconds`` limits the repetitions."""
    contestants = [COMPUTE, *names, AUTO]
    times: dict[str, list[float]] = {name: [] for name in contestants}
    with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
        store_file = str(Path(folder) / "store")
        with Pool(
            LinkRank, RANKS, timeout=300, store_file=store_file, namespaces=namespaces, workload=workload.name
        ) as pool:
            for name in contestants:
                print(f"{workload.name}, {gbit:g} Gbit/s: {name}", file=sys.stderr, flush=True)
                pool.call("build", name=name)
                for _ in range(3):  # DDP rebuilds its buckets after the first
                    pool.call("step", name=name)
            chosen = ""
            for _ in range(MOST_STEPS_OF_AUTO):
                if chosen := pool.call("chosen")[0]:
                    break
                pool.call("step", name=AUTO)
            begin, last = time.monotonic(), 0.0
            for repetition in range(repetitions):
                if last and time.monotonic() - begin + last > seconds:
                    break
                last = -time.monotonic()
                for name in in_turn(contestants, repetition):
                    for _ in range(2):
                        took = pool.call("step", name=name)
                    times[name].append(max(took))
                last += time.monotonic()
    timings = {name: Timing.of(taken) for name, taken in times.items()}
    base = timings["none"].median
    return [
        {
            "workload": workload.name,
            "gbit": gbit,
            "name": name,
            "ms": round(timing.median * 1e3, 2),
            "faster": round(base / timing.median, 3),
            **({"chosen": chosen or "nothing yet"} if name == AUTO else {}),
            **timing.as_dict(),
        }
        for name, timing in timings.items()
    ]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), help="beside none; default: all")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90, help="of repetitions, for a workload and rate")
    parser.add_argument("--json", help="where to write instead of bench/results/workload_links.json")
    options = parser.parse_args(arguments)
    if reason := netns.why_unavailable():
        sys.exit(f"bench.workload_links: {reason}")
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        workload = WORKLOADS[name]
        try:
            workload.batch(0, 0)
        except Unavailable as error:
            parser.error(str(error))
        wanted = options.methods or list(VARIANTS)
        names = [variant for variant in timed(workload) if variant == "none" or variant in wanted]
        for gbit in options.gbit:
            measured = measure(gbit, workload, names, options.repetitions, options.seconds)
            rows += measured
            output.table(
                f"a step of {workload.name}, {RANKS} ranks, {gbit:g} Gbit/s",
                ["", "ms", "faster"],
                [
                    [
                        row["name"] + (f": {row['chosen']}" if "chosen" in row else ""),
                        f"{row['ms']:,.1f}",
                        f"{row['faster']:.2f}x",
                    ]
                    for row in measured
                ],
            )
    result = {"machine": machine.describe(), "load": os.getloadavg(), "rows": rows}
    print(output.write("workload_links", result, options.json))
    return result


if __name__ == "__main__":
    main()
