"""Command ``dtcomm demo``: train a small language model with plain DDP and with compressed gradients.

The ranks are processes of this machine; the main process shows their progress, and prints and writes the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dtcomm.cli import COLOURS, new_table, split_codecs, styled_pyplot
from dtcomm.cli.demo import train
from dtcomm.cli.demo.train import PLAIN, Settings
from dtcomm.codecs import codec
from dtcomm.launch.ranks import RankError, RankTimeout, send_to_parent, spawn_ranks
from dtcomm.system import save_figure, write_file

CODECS = "none,fp16,int8"

#: Ranks report every few seconds; if none does for this long, they hang.
SILENCE_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    """Run the command: print the table, write demo.json and demo.png; return 0, or 1 if a rank failed."""
    options = _parse(argv)
    console = Console(stderr=options.json)
    seeds = range(options.seed, options.seed + options.seeds)
    runs = (PLAIN, *options.codecs)
    begin = time.monotonic()
    console.print(
        "A character-level GPT learns from the source of Python's standard library:\n"
        f"{options.nproc} ranks, {options.steps} steps, {len(runs)} runs in turns.",
        highlight=False,
    )
    results: dict[int, list[list[dict[str, Any]]]] = {}
    for seed in seeds:
        settings = Settings(runs=runs, steps=options.steps, seed=seed)
        try:
            results[seed] = _train(
                settings, options.nproc, console, f"seed {seed}: " if len(seeds) > 1 else ""
            )
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
    summary = summarize(results, nproc=options.nproc, steps=options.steps, seconds=time.monotonic() - begin)

    options.out.mkdir(parents=True, exist_ok=True)
    write_file(options.out / "demo.json", json.dumps(summary, indent=1) + "\n")
    write_plot(summary, options.out / "demo.png")
    if options.json:
        print(json.dumps(summary))
    print_summary(summary, console)
    console.print(f"\nWrote {options.out / 'demo.png'} and {options.out / 'demo.json'}")
    return 0


def train_rank(rank: int, world_size: int, settings: Settings) -> list[dict[str, Any]]:
    """Train on one rank; rank 0 sends its progress to the main process."""
    if rank:
        return train.train(settings)
    try:
        return train.train(settings, lambda name, step, loss: send_to_parent((name, step, loss)))
    finally:
        send_to_parent(None)


def _train(settings: Settings, nproc: int, console: Console, prefix: str) -> list[list[dict[str, Any]]]:
    """Train on all ranks with a progress bar for each run; return results by rank, then by run."""
    columns = (
        TextColumn(prefix + "{task.description:>9}"),
        BarColumn(40),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bars = {name: progress.add_task(name, total=settings.steps, loss="  -  ") for name in settings.runs}
        with spawn_ranks(train_rank, nproc, settings, fresh=True, group_timeout=SILENCE_SECONDS) as ranks:
            try:
                while (message := ranks.receive(0, SILENCE_SECONDS)) is not None:
                    assert isinstance(message, tuple)
                    name, step, loss = message
                    progress.update(bars[name], completed=step, loss=f"{loss:.3f}")
            except RankTimeout:
                pass  # the outcomes say what went wrong
            outcomes = ranks.join(SILENCE_SECONDS, grace=5.0)
    failures = [outcome for outcome in outcomes if not outcome.ok]
    if failures:
        raise RankError(
            "\n".join(f"{failure.describe_failure()}\n{failure.traceback}" for failure in failures)
        )
    return [outcome.result for outcome in outcomes]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dtcomm demo",
        description="Train a small language model with plain DDP and with compressed gradients, in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data order")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, starting with --seed")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for demo.json and demo.png"
    )
    parser.add_argument(
        "--codecs", type=_codecs, default=CODECS, help="codecs to compare with plain DDP, separated by ','"
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks; each is a process with one thread")
    parser.add_argument("--json", action="store_true", help="also print the JSON on standard output")
    options = parser.parse_args(argv)
    for name in ("steps", "seeds", "nproc"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    return options


def _codecs(text: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(codec(spec)) for spec in split_codecs([text])))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


#: Links for which the time of the measured bytes is printed, in Gbit/s.
LINK_GBITS = (1, 10, 100)

Result = dict[str, Any]

_TABLE_NOTES = """\
sent: by one rank, counted; * computed for Gloo, whose ring sends 2(n-1)/n.
comm: from the end of a rank's backward pass until all gradients are averaged,
      by DDP's timers; comm and step are medians, of the slowest rank.

Over shared memory compression saves bytes but no time: encoding costs about as
much as the smaller copy saves. On a link, the bytes of one step would take:"""


def summarize(
    results: dict[int, list[list[Result]]], *, nproc: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Summarize ``results``, which are by seed, rank and run.

    Losses are equal on all ranks. Bytes are means over ranks and times are the slowest rank's. Over seeds, losses and
    bytes are means and times are medians.
    """
    count = len(next(iter(results.values()))[0])
    runs = [
        _summarize_run({seed: [rank[position] for rank in ranks] for seed, ranks in results.items()})
        for position in range(count)
    ]
    plain = runs[0]
    for run in runs:
        run["held_out_against_plain"] = run["final_held_out_loss"] / plain["final_held_out_loss"] - 1
        run["bytes_against_plain"] = run["bytes_per_step"] / plain["bytes_per_step"]
        run["step_against_plain"] = run["step_ms"] / plain["step_ms"]
    return {"ranks": nproc, "steps": steps, "seconds": seconds, "runs": runs}


def _summarize_run(by_seed: dict[int, list[Result]]) -> dict[str, Any]:
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
    run["milliseconds_on_link"] = {f"{link} Gbit/s": sent * 8 / (link * 1e6) for link in LINK_GBITS}
    curves = ("final_training_loss", "final_held_out_loss", "losses", "held_out")
    run["seeds"] = {str(seed): {key: ranks[0][key] for key in curves} for seed, ranks in by_seed.items()}
    return run


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print the table and its legend."""
    runs = summary["runs"]
    seeds = len(runs[0]["seeds"])
    console.print(
        f"\n{summary['ranks']} ranks, {summary['steps']} steps, {runs[0]['parameters']:,} parameters, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {summary['seconds']:.0f} s",
        highlight=False,
    )
    losses = (">training\nloss", ">held-out\nloss", ">against\nplain")
    costs = (">sent,\nMB/step", ">against\nplain", ">comm\nms", ">step\nms")
    table = new_table(["gradients", *losses, *costs], plain=True)
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
    console.print(_TABLE_NOTES, highlight=False)
    links = new_table(["", *(f">{link} Gbit/s" for link in LINK_GBITS)], plain=True)
    for run in runs:
        times = run["milliseconds_on_link"].values()
        links.add_row(run["name"], *(f"{time:.{1 if time >= 1 else 2}f} ms" for time in times))
    console.print(links)


def write_plot(summary: dict[str, Any], path: Path) -> None:
    """Write a PNG of ``summary`` (see `summarize`); the curves are those of the first seed."""
    runs = summary["runs"]
    with styled_pyplot() as pyplot:
        figure = pyplot.figure(figsize=(11.5, 5.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1.7, 1), height_ratios=(2.4, 1))
        curves = figure.add_subplot(grid[0, 0])
        _plot_losses(curves, runs)
        _plot_differences(figure.add_subplot(grid[1, 0], sharex=curves), runs)
        sent = [run["bytes_per_step"] / 1e6 for run in runs]
        times = [next(iter(run["milliseconds_on_link"].values())) for run in runs]
        upper, lower = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
        _plot_bars(upper, runs, sent, "{:.2f}", "sent by each rank, MB per step")
        _plot_bars(lower, runs, times, "{:.0f}", "time of these bytes on a 1 Gbit/s link, ms")
        figure.suptitle(
            f"Character-level GPT on Python's standard library: {runs[0]['parameters'] / 1e6:.1f} M "
            f"parameters, {summary['ranks']} ranks, {summary['steps']} steps",
            fontsize=12.5,
            x=0.01,
            ha="left",
        )
        save_figure(figure, path)
        pyplot.close(figure)


def _plot_losses(axes: Any, runs: list[dict[str, Any]]) -> None:
    for position, run in enumerate(runs):
        seed = next(iter(run["seeds"].values()))
        colour = COLOURS[position % len(COLOURS)]
        smooth = _smooth(seed["losses"])
        axes.plot(
            range(1, len(smooth) + 1),
            smooth,
            color=colour,
            linewidth=5 if position == 0 else 1.3,
            alpha=0.5 if position == 0 else 0.95,
            label=f"{run['name']}: {run['final_held_out_loss']:.4f}",
            zorder=2 + position,
        )
        steps, losses = zip(*seed["held_out"], strict=True)
        # Rings of decreasing size, so that equal points of several runs stay visible.
        size = 120 - 28 * min(position, 3)
        axes.scatter(steps, losses, s=size, facecolors="none", edgecolors=colour, linewidths=1.3, zorder=9)
    axes.set_ylabel("nats per character")
    axes.set_title("training loss (lines, smoothed) and held-out loss (rings)")
    axes.grid(axis="y")
    axes.set_xlim(left=0)
    axes.tick_params(labelbottom=False)
    axes.legend(title="final held-out loss", frameon=False, alignment="left")


def _plot_differences(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Plot the smoothed training loss relative to plain DDP's at the same step, in percent."""
    plain = _smooth(next(iter(runs[0]["seeds"].values()))["losses"])
    axes.axhline(0, color=COLOURS[0], linewidth=3, alpha=0.5)
    reach = 0.02
    for position, run in enumerate(runs[1:], 1):
        smooth = _smooth(next(iter(run["seeds"].values()))["losses"])
        difference = [100 * (ours / theirs - 1) for ours, theirs in zip(smooth, plain, strict=True)]
        reach = max(reach, 1.2 * max(map(abs, difference)))
        axes.plot(range(1, len(plain) + 1), difference, color=COLOURS[position % len(COLOURS)], linewidth=1.3)
    axes.set_ylim(-reach, reach)
    axes.set_xlabel("step")
    axes.set_ylabel("%")
    axes.set_title("training loss against plain DDP")
    axes.grid(axis="y")


def _plot_bars(axes: Any, runs: list[dict[str, Any]], values: list[float], form: str, title: str) -> None:
    positions = range(len(runs))
    axes.barh(
        positions, values, color=[COLOURS[position % len(COLOURS)] for position in positions], height=0.64
    )
    for position, value in zip(positions, values, strict=True):
        share = f"  ({value / values[0]:.0%})" if position and values[0] else ""
        axes.text(value + 0.015 * max(values), position, form.format(value) + share, va="center")
    axes.set_yticks(positions, [run["name"] for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(values))
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(title)


def _smooth(values: list[float], memory: float = 0.9) -> list[float]:
    """Return the exponential moving average with bias correction at the start."""
    smooth, weight, total = [], 0.0, 0.0
    for value in values:
        total = memory * total + (1 - memory) * value
        weight = memory * weight + (1 - memory)
        smooth.append(total / weight)
    return smooth
