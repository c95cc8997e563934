"""Measure the time to the first token and the time of a token with tensor parallelism: dtcomm's layers and torch's.

python -m bench.tp_speed [--gbit 0 0.1 1 10] [--width 64 256] [--layers 4] [--repetitions N] [--json FILE]

Two ranks of one thread each run in two network namespaces, connected by a link of the rate `--gbit` (needs root and
iproute2), or, with 0, over shared memory. The model is a stack of transformer blocks in fp32. Prefill takes 512 tokens,
decode one. The contestants, which take turns, are dtcomm's layers; "gloo", a rank's layers written out with
`dist.all_reduce` on Gloo; and torch's styles, which sum through DTensor on Gloo. Both peers send fp32 activations or
activations rounded to bf16. "no sums" is a rank's part of the model without communication. The difference to "gloo
fp32" is communication; it dominates where it is at least three quarters of the time. Where it is less, no codec could
make a step four times as fast. "sums" is the four sums of two blocks of width 4096 for 512 tokens, without the products
between them. The exit status is 1 if a result is wrong; missed targets are printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from bench.common import machine, output, pages
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.turns import in_turn
from dtcomm.measure import netns

TORCH = ("torch fp32", "torch bf16")
GLOO = ("gloo fp32", "gloo bf16")
CODECS = {"none": "none", "int8": "int8", "int4": "int4", "int4 two_shot_symmetric": "int4"}
ALONE = "no sums"
HEAD = 64
SUMS = (4, 512, 4096)  # number of sums, tokens, features
DOMINANT_SHARE = 0.75
#: (Gbit/s, workload, codec, peer) → required speed-up; for prefill only where communication dominates.
TARGETS = {
    (gbit, workload, codec, f"{peer} {dtype}"): least
    for peer in ("torch", "gloo")
    for (gbit, workload, codec, dtype), least in {
        **{(1.0, workload, "int4", "fp32"): 4.0 for workload in ("prefill", "sums")},
        **{(1.0, workload, "int4", "bf16"): 2.0 for workload in ("prefill", "sums")},
        **{(gbit, "decode", codec, "fp32"): 0.95 for gbit in (1.0, 10.0) for codec in ("int4", "int8")},
        **{
            (0.0, workload, "none", "fp32"): 1.0
            for workload in ("prefill", "decode", "16 tokens", "128 tokens", "sums")
        },
    }.items()
}
TOKENS = {"prefill": 512, "decode": 1, "16 tokens": 16, "128 tokens": 128}


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, min(HEAD, x.shape[-1] // 2))).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Bf16RowwiseParallel(RowwiseParallel):
    """torch's style, which sums partial outputs that are rounded to bf16."""

    def _prepare_output_fn(
        self, output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, mesh: Any
    ) -> Any:  # type: ignore[override]
        output: Any = super()._prepare_output_fn(  # type: ignore[no-untyped-call]
            output_layouts, use_local_output, mod, outputs.to(torch.bfloat16), mesh
        )
        return output.to(torch.float32)


class SummedLinear(nn.Module):
    """A rank's part of a row-parallel layer, whose partial outputs Gloo sums in a dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = nn.Parameter(weight), nn.Parameter(bias), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = F.linear(x, self.weight).to(self.dtype)
        dist.all_reduce(partial)
        return partial.to(x.dtype) + self.bias


class Rank:
    """One rank with a model for each contestant; with namespaces, in a namespace of its own."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, rendezvous, namespaces)
        self.rank = rank
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.models: dict[str, nn.Module] = {}

    def build(self, name: str, width: int, layers: int) -> float:
        """Make a contestant's model; return its largest error, relative to the largest output of the dense model."""
        from dtcomm import tp

        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(layers))).eval()
        x = torch.randn(1, 256, width)  # enough that nothing takes the latency path
        with torch.no_grad():
            expected = model(x)
        columns, rows = ("q", "k", "v", "up"), ("o", "down")
        if name == ALONE:
            self.models[name] = nn.Sequential(*map(_one_rank_of, model))
            return 0.0
        if name in GLOO:
            dtype = torch.float32 if name == "gloo fp32" else torch.bfloat16
            model = nn.Sequential(*(_summed_by_gloo(block, self.rank, dtype) for block in model))
        elif name in TORCH:
            row = RowwiseParallel if name == "torch fp32" else Bf16RowwiseParallel
            plan: dict[str, Any] = {}
            for block in range(layers):
                plan |= {f"{block}.{layer}": ColwiseParallel() for layer in columns}
                plan |= {f"{block}.{layer}": row(output_layouts=Replicate()) for layer in rows}
            parallelize_module(model, self.mesh, plan)
        else:
            layer_plan = {f"*.{layer}": "column" for layer in columns} | {
                f"*.{layer}": "row" for layer in rows
            }
            algorithm = "two_shot_symmetric" if name.endswith("two_shot_symmetric") else "auto"
            tp.compress(model, self.mesh, CODECS[name], layer_plan, algorithm=algorithm, chunks="auto")
        self.models[name] = model
        with torch.no_grad():
            return float((model(x) - expected).abs().max() / expected.abs().max())

    def measure(self, name: str, workload: str, width: int, iters: int) -> float:
        """Return this rank's mean seconds of ``iters`` steps that follow each other without a pause."""
        dist.barrier()
        call = self._sums(name) if workload == "sums" else self._forward(name, TOKENS[workload], width)
        with torch.no_grad():
            call()
            start = time.perf_counter()
            for _ in range(iters):
                call()
            return (time.perf_counter() - start) / iters

    def reason(self, name: str) -> str:
        """Return why the last small sum was sent uncompressed; empty if none was."""
        from dtcomm.tp.sharded_module import ShardedModule

        layers = [module for module in self.models[name].modules() if isinstance(module, ShardedModule)]
        reasons = [layer.comm.traffic.reason for layer in layers]
        return next(filter(None, reasons), "")

    def close(self) -> None:
        """Leave the group."""
        self.models.clear()
        dist.destroy_process_group()

    def _forward(self, name: str, tokens: int, width: int) -> Any:
        x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(1))
        return lambda: self.models[name](x)

    def _sums(self, name: str) -> Any:
        from dtcomm import tp
        from dtcomm.tp import functional

        count, tokens, features = SUMS
        x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(self.rank))
        algorithm = "two_shot_symmetric" if name.endswith("two_shot_symmetric") else "auto"
        comm = None
        if name not in GLOO:
            comm = tp.make_comm_config(CODECS[name], algorithm=algorithm, group=self.mesh)

        def call() -> None:
            for _ in range(count):
                if comm is not None:
                    functional.all_reduce(x, comm)
                elif name == "gloo bf16":
                    rounded = x.to(torch.bfloat16)
                    dist.all_reduce(rounded)
                    rounded.to(torch.float32)
                else:
                    dist.all_reduce(x.clone())

        return call


def _one_rank_of(block: Any) -> nn.Module:
    """Return the block with layers of one rank's sizes, which computes without sums."""
    for name in ("q", "k", "v", "up"):
        layer = getattr(block, name)
        setattr(block, name, nn.Linear(layer.in_features, layer.out_features // 2))
    for name in ("o", "down"):
        layer = getattr(block, name)
        setattr(block, name, nn.Linear(layer.in_features // 2, layer.out_features))
    shrunk: nn.Module = block
    return shrunk


def _summed_by_gloo(block: Any, rank: int, dtype: torch.dtype) -> nn.Module:
    """Return the block with one rank's part of each layer; Gloo sums the outputs of the row-parallel ones."""
    for name in ("q", "k", "v", "up"):
        layer = getattr(block, name)
        part = nn.Linear(layer.in_features, layer.out_features // 2)
        with torch.no_grad():
            part.weight.copy_(layer.weight.chunk(2)[rank])
            part.bias.copy_(layer.bias.chunk(2)[rank])
        setattr(block, name, part)
    for name in ("o", "down"):
        layer = getattr(block, name)
        part = layer.weight.detach().chunk(2, dim=1)[rank].contiguous()
        setattr(block, name, SummedLinear(part, layer.bias.detach(), dtype))
    summed: nn.Module = block
    return summed


def measure(gbit: float, widths: list[int], layers: int, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each workload and width; the contestants take turns."""
    rows = []
    hosts: Any = netns.two_hosts(gbit) if gbit else nullcontext([])
    with hosts as namespaces, tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        with Pool(Rank, 2, timeout=120, rendezvous=rendezvous, namespaces=namespaces) as pool:
            for width in widths if gbit == 0 or gbit >= 1 else widths[-1:]:
                names = [*TORCH, *GLOO, *CODECS, ALONE]
                options = {"width": width, "layers": layers}
                errors = {name: max(pool.call("build", name=name, **options)) for name in names}
                workloads = list(TOKENS) if gbit == 0 and width == widths[-1] else ["prefill", "decode"]
                workloads += ["sums"] if width == widths[-1] else []
                workloads = workloads if gbit == 0 or gbit >= 1 else ["prefill"]
                for workload in workloads:
                    contestants = [*GLOO, *CODECS] if workload == "sums" else names
                    row = _row(pool, gbit, workload, width, contestants, repetitions)
                    row["errors"] = {name: round(error, 6) for name, error in errors.items()}
                    row["latency_path"] = {name: pool.call("reason", name=name)[0] for name in CODECS}
                    rows.append(row)
    return rows


def _row(
    pool: Any, gbit: float, workload: str, width: int, names: list[str], repetitions: int
) -> dict[str, Any]:
    call = {"workload": workload, "width": width}
    iters = {name: iterations(max(pool.call("measure", name=name, iters=1, **call)), 0.1) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in in_turn(names, repetition):
            times[name].append(max(pool.call("measure", name=name, iters=iters[name], **call)))
    timings = {name: Timing.of(series) for name, series in times.items()}
    computing = timings[ALONE].median / timings["gloo fp32"].median if ALONE in names else 0.0
    share = max(0.0, 1.0 - computing)
    return {
        "gbit": gbit,
        "what": workload,
        "width": SUMS[2] if workload == "sums" else width,
        "communication": round(share, 3),
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "figures": [
            _figure(gbit, workload, share, name, rival, timings[rival].median / timings[name].median)
            for name in CODECS
            for rival in (*TORCH, *GLOO)
            if rival in names
        ],
    }


def _figure(gbit: float, workload: str, share: float, name: str, rival: str, ratio: float) -> dict[str, Any]:
    """Return the speed-up of dtcomm's contestant ``name`` over ``rival``, with its target and verdict."""
    target = TARGETS.get((gbit, workload, name, rival))
    if workload == "prefill" and gbit and share < DOMINANT_SHARE:
        target = None
    verdict = None if target is None else "PASS" if ratio >= target else "MISS"
    return {"codec": name, "against": rival, "ratio": round(ratio, 3), "target": target, "verdict": verdict}


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table.

    It has milliseconds, the share of communication, and speed-ups over Gloo's sums in fp32 and in bf16; in results that
    lack them, over torch's styles.
    """
    against = {figure["against"] for row in rows for figure in row["figures"]}
    rivals = GLOO if against & set(GLOO) else TORCH
    peers = [name for name in (*TORCH, *GLOO) if name in against]
    table_rows = []
    for row in rows:
        share = row["communication"]
        cells = [f"{_medium(row)}, {row['what']}", str(row["width"])]
        cells += [_milliseconds(row, name) for name in (*peers, ALONE)]
        cells.append("–" if share is None else f"{100 * share:.0f} %")
        for name in CODECS:
            figures = [
                figure for figure in row["figures"] if figure["codec"] == name and figure["against"] in rivals
            ]
            ratios = " / ".join(
                f"{figure['ratio']:.2f}x{' !' if figure['verdict'] == 'MISS' else ''}" for figure in figures
            )
            cells.append(f"{_milliseconds(row, name)}: {ratios}")
        table_rows.append(cells)
    columns = ["", "width", *(f"{name} ms" for name in (*peers, ALONE)), "communication", *CODECS]
    return columns, table_rows


def _medium(row: dict[str, Any]) -> str:
    return f"{row['gbit']:g} Gbit/s" if row["gbit"] else "shared memory"


def _milliseconds(row: dict[str, Any], name: str) -> str:
    timing = row["contestants"].get(name)
    if timing is None:
        return "–"
    return f"{timing['median_us'] / 1e3:.3g}{pages.spread(timing, 'median_us', lambda us: f'{us / 1e3:.3g}')}"


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each figure with a target, and for each prefill that communication does not dominate."""
    lines = []
    for row in rows:
        case = f"{_medium(row)}, {row['what']}, width {row['width']}"
        lines += [
            f"{figure['verdict']} {case}: {figure['codec']} {figure['ratio']:.2f}x {figure['against']}, "
            f"at least {figure['target']:g}"
            for figure in row["figures"]
            if figure["verdict"] is not None
        ]
        share = row["communication"]
        if row["what"] == "prefill" and row["gbit"] == 1 and share is not None and share < DOMINANT_SHARE:
            ratio = next(
                figure["ratio"]
                for figure in row["figures"]
                if (figure["codec"], figure["against"]) == ("int4", "gloo fp32")
            )
            lines.append(
                f"no target {case}: communication is {100 * share:.0f} % of the time, so nothing could be more "
                f"than {1 / (1 - share):.1f}x as fast; int4 is {ratio:.2f}x"
            )
    return lines


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/tensor-parallel.md."""
    rows = [
        {**row, "figures": [{**figure, "verdict": None} for figure in row["figures"]]}
        for row in result["rows"]
    ]
    return pages.markdown(*table(rows), aligned=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gbit", type=float, nargs="+", default=[0, 0.1, 1, 10], help="0: shared memory; below 1 prefill"
    )
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="where to write instead of bench/results/tp_speed.json")
    options = parser.parse_args(arguments)
    if any(options.gbit) and (reason := netns.why_unavailable()):
        sys.exit(f"bench.tp_speed: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        link_rows = measure(gbit, options.width, options.layers, options.repetitions)
        output.table(
            "ms, and how many times faster than Gloo's fp32 / bf16 sums (! misses)", *table(link_rows)
        )
        rows += link_rows
    print("\n".join(verdicts(rows)))
    settings = {"layers": options.layers, "sums": SUMS}
    result = {"machine": machine.describe(), **settings, "rows": rows}
    print(output.write("tp_speed", result, options.json))
    return result


if __name__ == "__main__":
    wrong = [
        row["errors"]
        for row in main()["rows"]
        if any(
            not error < (1e-4 if name in ("none", "torch fp32", "gloo fp32") else 0.3)
            for name, error in row["errors"].items()
        )
    ]
    sys.exit(f"wrong results: {wrong[0]}" if wrong else 0)
