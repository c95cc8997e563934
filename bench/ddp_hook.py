"""Compare the DDP hook with codec ``none`` and torch's allreduce_hook on Gloo, by bucket size.

python -m bench.ddp_hook [--ranks 2] [--codec none] [--buckets 1M 25M] [--quick] [--json FILE]

The model has equal parameters, one per bucket, and a backward pass that costs little besides communication. The same
ranks hold one such model for each hook, and the hooks take turns.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from bench.common import machine, output
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.torch_rank import TorchRank, new_store_file
from bench.common.turns import in_turn

KB, MB = 1 << 10, 1 << 20
BUCKETS = [256 * KB, MB, 5 * MB, 25 * MB, 100 * MB]
SIDES = ("torch", "dtcomm", "silent")


class Cheap(torch.nn.Module):
    """Parameters of ``numel`` floats with constant gradients, so that a backward pass is mostly communication."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(numel) for _ in range(count))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scaled sum of all weights."""
        return torch.stack([(weight * scale).sum() for weight in self.weights]).sum()


class HookRank(TorchRank):
    """A rank with a model for each side; ``silent`` does everything except communicating."""

    def prepare(self, bucket: int, count: int, codec: str) -> float:
        """Build the models for buckets of ``bucket`` bytes; return how far their gradients differ."""
        import dtcomm.ddp

        self.models: dict[str, DistributedDataParallel] = {}
        for side in SIDES:
            model = DistributedDataParallel(Cheap(count, bucket // 4), bucket_cap_mb=bucket / MB)
            if side == "torch":
                model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
            elif side == "dtcomm":
                model.register_comm_hook(dtcomm.ddp.State(codec), dtcomm.ddp.hook)
            self.models[side] = model
            for _ in range(3):  # DDP rebuilds its buckets after the first
                self._step(side)
        pairs = zip(self.models["torch"].parameters(), self.models["dtcomm"].parameters(), strict=True)
        gradients = [(a.grad, b.grad) for a, b in pairs]
        return max(float((a - b).abs().max()) for a, b in gradients if a is not None and b is not None)

    def measure_step(self, side: str, iters: int) -> float:
        """Return the seconds of a forward and backward pass, from ``iters`` passes."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(iters):
            self._step(side)
        return (time.perf_counter() - start) / iters

    def _step(self, side: str) -> None:
        model = self.models[side]
        model.zero_grad(set_to_none=False)
        if side == "silent":
            with model.no_sync():
                model(torch.tensor(self.rank + 1.0)).backward()
        else:
            model(torch.tensor(self.rank + 1.0)).backward()


def measure(pool: Pool, repetitions: int, budget: float) -> dict[str, list[float]]:
    """Return the seconds of a step on the slowest rank, by side and repetition."""
    iters = {
        side: iterations(max(pool.call("measure_step", side=side, iters=1)), budget, 200) for side in SIDES
    }
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for repetition in range(repetitions):
        for side in in_turn(SIDES, repetition):
            times[side].append(max(pool.call("measure_step", side=side, iters=iters[side])))
    return times


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codec", default="none")
    parser.add_argument(
        "--buckets", type=output.parse_size, nargs="+", default=BUCKETS, help="such as 1M 25M"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="where to write instead of bench/results/ddp_hook.json")
    options = parser.parse_args(arguments)
    repetitions, budget = (5, 0.05) if options.quick else (11, 0.1)
    rows, lines = [], []
    with Pool(HookRank, options.ranks, store_file=new_store_file(), pinned=False) as pool:
        for bucket in options.buckets:
            count = max(2, min(8, 200 * MB // bucket))
            difference = max(pool.call("prepare", bucket=bucket, count=count, codec=options.codec))
            times, conditions = machine.steady(partial(measure, pool, repetitions, budget), attempts=2)
            timings = {side: Timing.of(series) for side, series in times.items()}
            compute_only = timings["silent"].median
            waited = {side: max(0.0, timings[side].median - compute_only) for side in ("torch", "dtcomm")}
            ratio = timings["torch"].median / timings["dtcomm"].median
            verdict = "PASS" if ratio > 1 else "MISS"
            rows.append(
                {
                    "bucket_bytes": bucket,
                    "buckets": count,
                    **conditions,
                    "largest_difference": difference,
                    **{side: timing.as_dict() for side, timing in timings.items()},
                    "ratio_of_steps": round(ratio, 3),
                    "verdict": verdict,
                }
            )
            line = [f"{count} x {output.size_name(bucket)}"]
            line += [output.microseconds(timings[side].median) for side in SIDES]
            line += [
                f"{ratio:.2f}x",
                f"{waited['torch'] / max(waited['dtcomm'], 1e-9):.1f}x",
                f"{difference:g}",
                verdict,
            ]
            lines.append(line)
    columns = [
        "buckets",
        "torch µs",
        "dtcomm µs",
        "no communication µs",
        "step",
        "waiting",
        "max diff",
        "verdict",
    ]
    output.table(
        f"a DDP step, {options.ranks} ranks: allreduce_hook on Gloo, dtcomm {options.codec}", columns, lines
    )
    result = {
        "machine": machine.describe(),
        "ranks": options.ranks,
        "codec": options.codec,
        "quick": options.quick,
        "rows": rows,
    }
    print(output.write("ddp_hook", result, options.json))
    return result


if __name__ == "__main__":
    main()
