"""The README's tables, formatted from committed results."""

from __future__ import annotations

from typing import Any

from bench.common.output import microseconds, size_name
from bench.common.pages import markdown, spread, steps_by_case

PEERS = {
    "gloo": "Gloo",
    "mpi": "Open MPI (best of 3 settings)",
    "deepspeed": "DeepSpeed",
    "oneccl": "oneCCL",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def readme(result: dict[str, Any]) -> str:
    """Return the tables of all_reduce, one for each dtype: the times of dtcomm and its peers by size and ranks."""
    tables = []
    for dtype, name in DTYPES.items():
        rows = [row for row in result["rows"] if row.get("dtype", "float32") == dtype]
        if rows:
            tables.append(_times(rows, name))
    trips = [trip for row in result["rows"] for trip in row["round_trip_ns"] if trip is not None]
    machine = result["machine"]
    description = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
    if trips:
        description += f", cache line to the other core and back in {min(trips):.0f} to {max(trips):.0f} ns"
    return "\n\n".join([*tables, description])


def _times(rows: list[dict[str, Any]], dtype: str) -> str:
    timed = [(row, medians(row)) for row in rows]
    peers = [peer for peer in PEERS if any(peer in seconds for _, seconds in timed)]
    heads = [f"all_reduce, {dtype}", "dtcomm", "`dtcomm.empty`", *(PEERS[peer] for peer in peers)]
    lines = []
    for row, seconds in timed:
        if "dtcomm" not in seconds:
            continue
        cells = [f"{size_name(row['bytes'])}, {row['ranks']} ranks"]
        cells += [
            f"{microseconds(seconds[ours])} µs{_range(row, ours)}" for ours in ("dtcomm", "dtcomm.empty")
        ]
        for peer in peers:
            cells.append(
                f"{microseconds(seconds[peer])} µs{_range(row, peer)} ({seconds[peer] / seconds['dtcomm']:.1f}x)"
                if peer in seconds
                else ""
            )
        lines.append(cells)
    return markdown(heads, lines, aligned=True)


def between_hosts(two_hosts: dict[str, Any], slow_link: dict[str, Any], fsdp_speed: dict[str, Any]) -> str:
    """Return the table of speed-ups over uncompressed Gloo between two hosts, from the results of three programs."""
    links = ("1", "10")
    sums = {
        (f"{row['gbit']:g}", figure["codec"]): _speedup(figure, "ratio")
        for row in two_hosts["rows"]
        if row["bytes"] == 64 * 2**20
        for figure in row["figures"]
    }
    steps = steps_by_case(slow_link["rows"])
    shards = {(row["link"], row["name"]): _speedup(row, "faster_than_fp32") for row in fsdp_speed["rows"]}
    lines = []
    for codec in ("none", "int8", "int4"):
        lines.append(["all_reduce, 64 MB", f"`{codec}`", *(sums[link, codec] for link in links)])
    shown = {
        "torch: fp16": "torch's fp16 hook",
        "torch: bf16": "torch's bf16 hook",
        "torch: powersgd 1": "torch's PowerSGD hook, rank 1",
        "bf16, stochastic": "`bf16:round=stochastic`",
    }
    shown |= {name: f"`{name}`" for name in ("fp16", "int8", "int4", "auto")}
    shown |= {"topk 1%": "`topk:ratio=0.01`", "powersgd 1": "`powersgd:rank=1`"}
    for name, label in shown.items():
        cells = [
            "; ".join(
                " or ".join(_speedup(row, "faster") for row in steps[float(link), batch, name])
                for batch in (4, 256)
            )
            for link in links
        ]
        lines.append(["DDP, 25 M parameters", label, *cells])
    shown = {
        "gloo bf16": "Gloo, bf16 throughout",
        "none": "`none`",
        "int8, fp8": "gradients `int8`, parameters `fp8_e4m3`",
    }
    shown |= {"int4": "both `int4`"}
    for name, label in shown.items():
        lines.append(["FSDP2, a GPT of 12.7 M parameters", label, *(shards[link, name] for link in links)])
    return markdown(["2 hosts", "what travels", *(f"{link} Gbit/s" for link in links)], lines, aligned=True)


def _speedup(row: dict[str, Any], field: str) -> str:
    """Return ``1.31x [1.28–1.37]``: the median over runs, and their range if there are several."""
    return f"{row[field]:.2f}x{spread(row, field, '{:.2f}'.format)}"


def _range(row: dict[str, Any], family: str) -> str:
    """Return the range of the time of a family's fastest variant."""
    variants = [timing for timing in row["contestants"] if timing["family"] == family]
    fastest = min(variants, key=lambda timing: float(timing["median_us"]))
    return spread(fastest, "median_us", lambda us: microseconds(us / 1e6))


def medians(row: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of the fastest variant of each family."""
    best: dict[str, float] = {}
    for timing in row["contestants"]:
        seconds = timing["median_us"] / 1e6
        best[timing["family"]] = min(seconds, best.get(timing["family"], seconds))
    return best
