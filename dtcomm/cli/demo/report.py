"""Results of the demo: the summary for the JSON file, and the table."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

#: Links for which the time of the measured bytes is printed, in Gbit/s.
LINKS = (1, 10, 100)

Result = dict[str, Any]

_NOTES = """\
sent: by one rank, counted; * computed for Gloo, whose ring sends 2(n-1)/n.
comm: from the end of a rank's backward pass until all gradients are averaged,
      by DDP's timers; comm and step are medians, of the slowest rank.

Over shared memory compression saves bytes but no time: encoding costs about as
much as the smaller copy saves. On a link, the bytes of one step would take:"""


def summarise(
    results: dict[int, list[list[Result]]], *, nproc: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Summarize ``results``, which are by seed, rank and run.

    Losses are equal on all ranks. Bytes are means over ranks and times are the slowest rank's. Over seeds, losses and
    bytes are means and times are medians.
    """
    count = len(next(iter(results.values()))[0])
    runs = [
        _summarise_run({seed: [rank[position] for rank in ranks] for seed, ranks in results.items()})
        for position in range(count)
    ]
    plain = runs[0]
    for run in runs:
        run["held_out_against_plain"] = run["final_held_out_loss"] / plain["final_held_out_loss"] - 1
        run["bytes_against_plain"] = run["bytes_per_step"] / plain["bytes_per_step"]
        run["step_against_plain"] = run["step_ms"] / plain["step_ms"]
    return {"ranks": nproc, "steps": steps, "seconds": seconds, "runs": runs}


def _summarise_run(by_seed: dict[int, list[Result]]) -> dict[str, Any]:
    """Summarize one run, given by seed and rank."""
    first = next(iter(by_seed.values()))[0]
    run = {key: first[key] for key in ("name", "parameters", "gradient_bytes", "bytes_are", "report")}
    for key in ("final_training_loss", "final_held_out_loss"):
        run[key] = statistics.fmean(ranks[0][key] for ranks in by_seed.values())
    for key in ("step_ms", "communication_ms", "overlapped_communication_ms", "collective_ms"):
        slowest = [
            max(rank[key] for rank in ranks) for ranks in by_seed.values() if ranks[0][key] is not None
        ]
        run[key] = statistics.median(slowest) if slowest else None
    sent = statistics.fmean(rank["bytes_per_step"] for ranks in by_seed.values() for rank in ranks)
    run["bytes_per_step"] = sent
    run["milliseconds_on_link"] = {f"{link} Gbit/s": sent * 8 / (link * 1e6) for link in LINKS}
    curves = ("final_training_loss", "final_held_out_loss", "losses", "held_out")
    run["seeds"] = {str(seed): {key: ranks[0][key] for key in curves} for seed, ranks in by_seed.items()}
    return run


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the table and its legend."""
    runs = summary["runs"]
    seeds = len(runs[0]["seeds"])
    console.print(
        f"\n{summary['ranks']} ranks, {summary['steps']} steps, {runs[0]['parameters']:,} parameters, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {summary['seconds']:.0f} s",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("gradients", no_wrap=True)
    for heading in (
        "training\nloss",
        "held-out\nloss",
        "against\nplain",
        "sent,\nMB/step",
        "against\nplain",
        "comm\nms",
        "step\nms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        plain = run is runs[0]
        table.add_row(
            run["name"],
            f"{run['final_training_loss']:.4f}",
            f"{run['final_held_out_loss']:.4f}",
            "" if plain else f"{run['held_out_against_plain']:+.2%}",
            f"{run['bytes_per_step'] / 1e6:.2f}{'*' if plain else ' '}",
            "" if plain else f"{run['bytes_against_plain']:.2f}x",
            "-" if run["communication_ms"] is None else f"{run['communication_ms']:.1f}",
            f"{run['step_ms']:.1f}",
        )
    console.print(table)
    console.print(_NOTES, highlight=False)
    links = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    links.add_column("", no_wrap=True)
    for link in LINKS:
        links.add_column(f"{link} Gbit/s", justify="right", no_wrap=True)
    for run in runs:
        links.add_row(run["name"], *(_milliseconds(value) for value in run["milliseconds_on_link"].values()))
    console.print(links)


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
