"""Compare a step of a small GPT under FSDP2 with dtcomm's codecs and over Gloo in fp32 and bf16, in one run.

python -m bench.fsdp_speed [--links 1 10 memory] [--only NAMES] [--repetitions N] [--json FILE]

Two ranks run in two network namespaces connected by a link of the given Gbit/s (needs root and iproute2), then over
shared memory. A step is forward, backward and AdamW on so few symbols that communication dominates. Bytes are counted
by the link. "alone" is the step without communication: every rank gathers from itself. Contestants take turns of two
steps; the second is timed, since in training a step follows one of the same model too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.common import machine, output, pages
from bench.common.pool import Pool
from bench.common.stats import Timing
from bench.common.turns import in_turn
from dtcomm.cli.demo.train import GPT, ModelShape, cross_entropy
from dtcomm.measure import netns

SHAPE = ModelShape(vocabulary=97, context=16, layers=4, width=512, heads=8)
MEMORY = "memory"
FP32, BF16, ALONE = "gloo fp32", "gloo bf16", "alone"
SPECS: dict[str, dict[str, str]] = {
    "none": {"gradients": "none"},
    "bf16": {"gradients": "bf16", "parameters": "bf16"},
    "int8, fp8": {"gradients": "int8", "parameters": "fp8_e4m3"},
    "int4": {"gradients": "int4", "parameters": "int4"},
    "zero++": {"preset": "zero++"},
    "loco": {"preset": "loco"},
    "loco, fp8": {"preset": "loco", "parameters": "fp8_e4m3"},
    "sdp4bit": {"preset": "sdp4bit"},
}
# How many times the step rate of Gloo in fp32, and of Gloo in bf16.
TARGETS: dict[str, dict[str, tuple[float, float]]] = {
    "1": {"int8, fp8": (3.0, 1.7), "int4": (4.5, 2.6)},
    MEMORY: {"none": (1.3, 0.0), **{name: (1.0, 0.0) for name in SPECS if name != "none"}},
}


class ShardedRank:
    """One rank with a model for each contestant."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str] | None) -> None:
        if namespaces is not None:
            netns.init_process_group(rank, ranks, rendezvous, namespaces)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        self.rank = rank
        self.models: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer, Any]] = {}
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.single = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "self"))["self"]

    def build(self, name: str) -> str:
        """Make the model of the contestant ``name``; return the runtime that carries its bytes."""
        import dtcomm.fsdp

        torch.manual_seed(0)
        model = GPT(SHAPE)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        options: dict[str, Any] = {"mesh": self.single if name == ALONE else self.mesh}
        if name == BF16:
            options["mp_policy"] = half
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        blocks = list(model.blocks)
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        state = dtcomm.fsdp.compress(model, **SPECS[name]) if name in SPECS else None  # type: ignore[arg-type]
        self.models[name] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True), state
        return "torch" if state is None else str(dtcomm.info()["runtime"])

    def step(self, name: str) -> float:
        """Run a training step; return its seconds."""
        model, optimizer, _ = self.models[name]
        generator = torch.Generator().manual_seed(self.rank)
        symbols = torch.randint(SHAPE.vocabulary, (1, SHAPE.context + 1), generator=generator)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        value = cross_entropy(model, symbols[:, :-1], symbols[:, 1:])
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not bool(torch.isfinite(value)):
            raise AssertionError(f"{name}: the loss is {float(value)}")
        return time.perf_counter() - start

    def sent(self, name: str) -> tuple[int, int]:
        """Return the bytes that this rank has sent so far, as dtcomm counts them, and those that plain FSDP sends."""
        state = self.models[name][2]
        if state is None:
            return 0, 0
        traffic = _traffic(state)
        return sum(t.wire_bytes for t in traffic), sum(t.plain_bytes for t in traffic)

    def uncompressed(self, name: str) -> list[str]:
        """Return what was not compressed, and why."""
        state = self.models[name][2]
        if state is None:
            return []
        reasons = [t.reason for t in _traffic(state) if t.reason]
        return [*state.report().notes, *reasons]

    def close(self) -> None:
        """Leave the group."""
        self.models.clear()
        dist.destroy_process_group()


def _traffic(state: Any) -> list[Any]:
    """Return the counters of all collectives of a model."""
    return [traffic for by_kind in state.report().modules.values() for traffic in by_kind.values()]


def bytes_on_link(namespaces: list[str] | None) -> int:
    """Return the bytes that the first host's interface has sent."""
    if namespaces is None:
        return 0
    command = ["ip", "-n", namespaces[0], "-s", "-j", "link", "show", "dt0"]
    statistics = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(json.loads(statistics)[0]["stats64"]["tx"]["bytes"])


def measure(link: str, names: list[str], repetitions: int) -> list[dict[str, Any]]:
    """Return one row for each contestant: the slower rank's seconds of a step, taken in turns, and a step's bytes."""
    times: dict[str, list[float]] = {name: [] for name in names}
    link_bytes: dict[str, int] = dict.fromkeys(names, 0)
    counted: dict[str, int] = dict.fromkeys(names, 0)
    runtimes: dict[str, str] = {}
    hosts: Any = contextlib.nullcontext() if link == MEMORY else netns.two_hosts(float(link))
    with hosts as namespaces, TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        with Pool(ShardedRank, 2, timeout=200, rendezvous=rendezvous, namespaces=namespaces) as pool:
            for name in names:
                runtimes[name] = pool.call("build", name=name)[0]
                for _ in range(2):  # communicators, buffers, and the first whole parameters of differences
                    pool.call("step", name=name)
            for repetition in range(repetitions):
                for name in in_turn(names, repetition):
                    pool.call("step", name=name)
                    link_before = bytes_on_link(namespaces)
                    counted_before = pool.call("sent", name=name)[0][0]
                    times[name].append(max(pool.call("step", name=name)))
                    link_bytes[name] += bytes_on_link(namespaces) - link_before
                    counted[name] += pool.call("sent", name=name)[0][0] - counted_before
            uncompressed = {name: pool.call("uncompressed", name=name)[0] for name in names}
    timings = {name: Timing.of(series) for name, series in times.items()}
    rows = []
    for name in names:
        faster = [round(timings[peer].median / timings[name].median, 3) for peer in (FP32, BF16)]
        targets = TARGETS.get(link, {}).get(name)
        verdict = ""
        if targets is not None:
            verdict = "PASS" if all(a >= b for a, b in zip(faster, targets, strict=True)) else "MISS"
        rows.append(
            {
                "link": link,
                "name": name,
                **SPECS.get(name, {}),
                "runtime": runtimes[name],
                "ms": round(timings[name].median * 1e3, 1),
                "faster_than_fp32": faster[0],
                "faster_than_bf16": faster[1],
                "targets": targets,
                "verdict": verdict,
                "link_bytes": link_bytes[name] // repetitions,
                "counted_bytes": counted[name] // repetitions,
                "uncompressed": uncompressed[name],
                **timings[name].as_dict(),
            }
        )
    return rows


def show(link: str, rows: list[dict[str, Any]]) -> None:
    """Print the table of one link."""
    table_rows = []
    for row in rows:
        targets = " / ".join(f"{target:g}x" for target in row["targets"] or () if target)
        table_rows.append(
            [
                row["name"],
                f"{row['ms']:,.0f}",
                f"{row['faster_than_fp32']:.2f}x",
                f"{row['faster_than_bf16']:.2f}x",
                targets,
                row["verdict"],
                f"{row['link_bytes'] / 1e6:.1f}",
                f"{row['counted_bytes'] / 1e6:.1f}",
            ]
        )
    parameters = sum(p.numel() for p in GPT(SHAPE).parameters())
    medium = _medium(link)
    columns = ["", "ms", "fp32's rate", "bf16's rate", "targets", "verdict", "MB on the link", "MB counted"]
    output.table(
        f"an FSDP2 step of {parameters / 1e6:.1f} M parameters, 2 ranks, {medium}", columns, table_rows
    )


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/fsdp.md: milliseconds a step, and speed-ups over Gloo in fp32 and bf16."""
    measured = {(row["link"], row["name"]): row for row in result["rows"]}
    links = list(dict.fromkeys(link for link, _ in measured))
    table_rows = []
    for name in dict.fromkeys(name for _, name in measured):
        cells = [name]
        for link in links:
            row = measured.get((link, name))
            if row is None:
                cells.append("")
                continue
            took = f"{row['ms']:.0f}{pages.spread(row, 'ms', '{:.0f}'.format)}"
            cells.append(f"{took} ({row['faster_than_fp32']:.2f}×, {row['faster_than_bf16']:.2f}×)")
        sent = next((measured[link, name]["link_bytes"] for link in links if link != MEMORY), 0)
        table_rows.append([*cells, f"{sent / 1e6:.1f}"])
    columns = ["ms a step", *map(_medium, links), "MB on the link"]
    return pages.markdown(columns, table_rows)


def _medium(link: str) -> str:
    return "shared memory" if link == MEMORY else f"{link} Gbit/s"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", default=["1", "10", MEMORY], help="Gbit/s, or memory")
    parser.add_argument(
        "--only", nargs="+", choices=list(SPECS), default=list(SPECS), help="codecs to measure"
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", help="where to write instead of bench/results/fsdp_speed.json")
    options = parser.parse_args(arguments)
    if any(link != MEMORY for link in options.links) and (reason := netns.why_unavailable()):
        sys.exit(f"bench.fsdp_speed: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for link in options.links:
        link_rows = measure(link, [FP32, BF16, ALONE, *options.only], options.repetitions)
        show(link, link_rows)
        rows += link_rows
    result = {"machine": machine.describe(), "load": os.getloadavg(), "rows": rows}
    print(output.write("fsdp_speed", result, options.json))
    return result


if __name__ == "__main__":
    main()
