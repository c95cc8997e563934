"""Time to the first token and of a token with tensor parallelism: dtcomm's layers beside torch's own on Gloo, in turn.

python -m bench.tp_speed [--gbit 0 0.1 1 10] [--width 64 256] [--layers 4] [--repetitions N] [--json FILE]

Two ranks, one thread each: in two network namespaces joined by a link of a given rate (needs root and iproute2), or, at
0, sharing memory. The model is a stack of transformer blocks in fp32: prefill is 512 tokens, decode one. torch's styles
send activations as they are or, "bf16", rounded for the way. "no sums" is a rank's part of the model by itself; what
torch takes longer with fp32 activations is its communication, and where that is three quarters of the time it
dominates: below, no codec could make a step four times as fast. "sums" is the four sums of two blocks 4096 wide for 512
tokens without the products between them. Minutes. Exit status 1 where a result is wrong; a missed target is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
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
from dtcomm.measure import netns

TORCH = ("torch fp32", "torch bf16")
OURS = {"none": "none", "int8": "int8", "int4": "int4", "int4 two_shot_symmetric": "int4"}
ALONE = "no sums"
HEAD = 64
SUMS = (4, 512, 4096)  # how many, tokens, features
DOMINATES = 0.75
#: Times faster, by Gbit/s, what is measured, whose and against whom; of a prefill, where communication dominates.
TARGETS = {
    **{(1.0, what, "int4", "torch fp32"): 4.0 for what in ("prefill", "sums")},
    **{(1.0, what, "int4", "torch bf16"): 2.0 for what in ("prefill", "sums")},
    **{(gbit, "decode", codec, "torch fp32"): 0.95 for gbit in (1.0, 10.0) for codec in ("int4", "int8")},
    **{
        (0.0, what, "none", "torch fp32"): 1.0
        for what in ("prefill", "decode", "16 tokens", "128 tokens", "sums")
    },
}
TOKENS = {"prefill": 512, "decode": 1, "16 tokens": 16, "128 tokens": 128}


class Block(nn.Module):
    """Causal attention and a perceptron, each normalised first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.norms[0](x)
        q, k, v = (
            each(before).unflatten(-1, (-1, min(HEAD, x.shape[-1] // 2))).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Rounded(RowwiseParallel):
    """torch's own, its partial sums rounded to bf16 for the way."""

    def _prepare_output_fn(
        self, output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, mesh: Any
    ) -> Any:  # type: ignore[override]
        made: Any = super()._prepare_output_fn(  # type: ignore[no-untyped-call]
            output_layouts, use_local_output, mod, outputs.to(torch.bfloat16), mesh
        )
        return made.to(torch.float32)


class Rank:
    """One rank, in a namespace of its own where there are namespaces."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        if namespaces:
            netns.init_process_group(rank, ranks, rendezvous, namespaces)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.set_num_threads(1)
            where = {"init_method": f"file://{rendezvous}", "timeout": timedelta(seconds=60)}
            dist.init_process_group("gloo", rank=rank, world_size=ranks, **where)
        self.rank = rank
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.models: dict[str, nn.Module] = {}

    def build(self, name: str, width: int, layers: int) -> float:
        """Makes a contestant's model; returns its largest error against the whole model's, by the largest output."""
        from dtcomm import tp

        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width) for _ in range(layers))).eval()
        x = torch.randn(1, 256, width)  # enough that nothing takes the latency path
        with torch.no_grad():
            expected = model(x)
        columns, rows = ("q", "k", "v", "up"), ("o", "down")
        if name == ALONE:
            self.models[name] = nn.Sequential(*map(_part, model))
            return 0.0
        if name in TORCH:
            row = RowwiseParallel if name == "torch fp32" else Rounded
            plan: dict[str, Any] = {}
            for at in range(layers):
                plan |= {f"{at}.{each}": ColwiseParallel() for each in columns}
                plan |= {f"{at}.{each}": row(output_layouts=Replicate()) for each in rows}
            parallelize_module(model, self.mesh, plan)
        else:
            kinds = {f"*.{each}": "column" for each in columns} | {f"*.{each}": "row" for each in rows}
            algorithm = "two_shot_symmetric" if name.endswith("two_shot_symmetric") else "auto"
            tp.compress(model, self.mesh, kinds, OURS[name], algorithm=algorithm, chunks="auto")
        self.models[name] = model
        with torch.no_grad():
            return float((model(x) - expected).abs().max() / expected.abs().max())

    def measure(self, name: str, what: str, width: int, iters: int) -> float:
        """Seconds a step of this rank, from so many back to back after a common start."""
        dist.barrier()
        call = self._sums(name) if what == "sums" else self._forward(name, TOKENS[what], width)
        with torch.no_grad():
            call()
            start = time.perf_counter()
            for _ in range(iters):
                call()
            return (time.perf_counter() - start) / iters

    def traffic(self, name: str) -> str:
        """Why the last small sum took the latency path, where one did."""
        wires = [getattr(module, "wire", None) for module in self.models[name].modules()]
        return next((wire.traffic.why for wire in wires if wire is not None and wire.traffic.why), "")

    def close(self) -> None:
        """Leaves the group."""
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
        over = (
            None if name in TORCH else tp.make_comm_config(OURS[name], algorithm=algorithm, group=self.mesh)
        )

        def call() -> None:
            for _ in range(count):
                if over is not None:
                    functional.all_reduce(x, over)
                elif name == "torch bf16":
                    rounded = x.to(torch.bfloat16)
                    dist.all_reduce(rounded)
                    rounded.to(torch.float32)
                else:
                    dist.all_reduce(x.clone())

        return call


def _part(block: Any) -> nn.Module:
    """What a rank has of a block, without the sums."""
    for name in ("q", "k", "v", "up"):
        layer = getattr(block, name)
        setattr(block, name, nn.Linear(layer.in_features, layer.out_features // 2))
    for name in ("o", "down"):
        layer = getattr(block, name)
        setattr(block, name, nn.Linear(layer.in_features // 2, layer.out_features))
    whole: nn.Module = block
    return whole


def measure(gbit: float, widths: list[int], layers: int, repetitions: int) -> list[dict[str, Any]]:
    """A row for each thing measured, contestants by turns."""
    rows = []
    place: Any = netns.two_hosts(gbit) if gbit else nullcontext([])
    with place as namespaces, tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meet")
        with Pool(Rank, 2, timeout=120, rendezvous=meeting, namespaces=namespaces) as pool:
            for width in widths if gbit == 0 or gbit >= 1 else widths[-1:]:
                names = [*TORCH, *OURS, ALONE]
                options = {"width": width, "layers": layers}
                errors = {name: max(pool.call("build", name=name, **options)) for name in names}
                wanted = list(TOKENS) if gbit == 0 and width == widths[-1] else ["prefill", "decode"]
                wanted += ["sums"] if width == widths[-1] else []
                wanted = wanted if gbit == 0 or gbit >= 1 else ["prefill"]
                for what in wanted:
                    row = _row(pool, gbit, what, width, names[:-1] if what == "sums" else names, repetitions)
                    row["errors"] = {name: round(error, 6) for name, error in errors.items()}
                    row["latency_path"] = {name: pool.call("traffic", name=name)[0] for name in OURS}
                    rows.append(row)
    return rows


def _row(pool: Any, gbit: float, what: str, width: int, names: list[str], repetitions: int) -> dict[str, Any]:
    call = {"what": what, "width": width}
    iters = {name: iterations(max(pool.call("measure", name=name, iters=1, **call)), 0.1) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:
            times[name].append(max(pool.call("measure", name=name, iters=iters[name], **call)))
    timings = {name: Timing.of(series) for name, series in times.items()}
    computing = timings[ALONE].median / timings["torch fp32"].median if ALONE in names else 0.0
    share = max(0.0, 1.0 - computing)
    return {
        "gbit": gbit,
        "what": what,
        "width": SUMS[2] if what == "sums" else width,
        "communication": round(share, 3),
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "figures": [
            _figure(gbit, what, share, ours, theirs, timings[theirs].median / timings[ours].median)
            for ours in OURS
            for theirs in TORCH
        ],
    }


def _figure(gbit: float, what: str, share: float, ours: str, theirs: str, ratio: float) -> dict[str, Any]:
    least = TARGETS.get((gbit, what, ours, theirs))
    if what == "prefill" and gbit and share < DOMINATES:
        least = None
    verdict = None if least is None else "PASS" if ratio >= least else "MISS"
    return {"codec": ours, "against": theirs, "ratio": round(ratio, 3), "target": least, "verdict": verdict}


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds, how much of torch's time is communication, and how many times faster than torch's with fp32 and
    with bf16."""
    lines = []
    for row in rows:
        where = f"{row['gbit']:g} Gbit/s" if row["gbit"] else "shared memory"
        share = row["communication"]
        cells = [f"{where}, {row['what']}", str(row["width"])]
        cells += [_milliseconds(row, name) for name in (*TORCH, ALONE)]
        cells.append("–" if share is None else f"{100 * share:.0f} %")
        for ours in OURS:
            pair = [figure for figure in row["figures"] if figure["codec"] == ours]
            ratios = " / ".join(
                f"{each['ratio']:.2f}x{' !' if each['verdict'] == 'MISS' else ''}" for each in pair
            )
            cells.append(f"{_milliseconds(row, ours)}: {ratios}")
        lines.append(cells)
    heads = ["", "width", *(f"{name} ms" for name in (*TORCH, ALONE)), "communication", *OURS]
    return heads, lines


def _milliseconds(row: dict[str, Any], name: str) -> str:
    found = row["contestants"].get(name)
    return "–" if found is None else f"{found['median_us'] / 1e3:.3g}"


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Every figure that has a target, and where a prefill has none because communication does not dominate."""
    lines = []
    for row in rows:
        where = f"{row['gbit']:g} Gbit/s" if row["gbit"] else "shared memory"
        where += f", {row['what']}, width {row['width']}"
        lines += [
            f"{each['verdict']} {where}: {each['codec']} {each['ratio']:.2f}x {each['against']}, "
            f"at least {each['target']:g}"
            for each in row["figures"]
            if each["verdict"] is not None
        ]
        share = row["communication"]
        if row["what"] == "prefill" and row["gbit"] == 1 and share is not None and share < DOMINATES:
            ratio = next(each["ratio"] for each in row["figures"] if each["codec"] == "int4")
            lines.append(
                f"no target {where}: communication is {100 * share:.0f} % of torch's time, so nothing could be more "
                f"than {1 / (1 - share):.1f}x as fast; int4 is {ratio:.2f}x"
            )
    return lines


def page(result: dict[str, Any]) -> str:
    """The table of docs/results/tensor-parallel.md."""
    rows = [
        {**row, "figures": [{**figure, "verdict": None} for figure in row["figures"]]}
        for row in result["rows"]
    ]
    return pages.markdown(*table(rows), aligned=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints, writes the file; returns what it wrote."""
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
    if any(options.gbit) and (why := netns.why_unavailable()):
        sys.exit(f"bench.tp_speed: {why}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        here = measure(gbit, options.width, options.layers, options.repetitions)
        output.table("ms, and how many times faster than torch fp32 / bf16 (! misses)", *table(here))
        rows += here
    print("\n".join(verdicts(rows)))
    settings = {"layers": options.layers, "sums": SUMS}
    result = {"machine": machine.describe(), **settings, "rows": rows}
    print(output.write("tp_speed", result, options.json))
    return result


if __name__ == "__main__":
    bad = [
        row["errors"]
        for row in main()["rows"]
        if any(
            not error < (1e-4 if name in ("none", "torch fp32") else 0.3)
            for name, error in row["errors"].items()
        )
    ]
    sys.exit(f"wrong results: {bad[0]}" if bad else 0)
