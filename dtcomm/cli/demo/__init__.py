"""Command ``dtcomm demo``: train a small language model with plain DDP and with compressed gradients.

It trains twice: in memory, where compression saves bytes but hardly any time, and over an emulated link. The ranks are
processes of this machine; the main process shows their progress, and prints and writes the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dtcomm.cli import COLOURS, new_table, split_codecs, styled_pyplot
from dtcomm.cli.demo import train
from dtcomm.cli.demo.train import PLAIN, Settings
from dtcomm.codecs import codec
from dtcomm.launch.ranks import RankError, RankTimeout, send_to_parent, spawn_ranks
from dtcomm.runtime import emulated_link
from dtcomm.system import save_figure, write_file

#: The default codec of the integrations, between one that needs no memory and a coarser one.
CODECS = "bf16:round=stochastic,int8,int4"
RECOMMENDED = "int8"
LINK = "1gbit,50us"
IN_MEMORY = "none"

#: Ranks report every few seconds; if none does for this long, they hang.
SILENCE_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    """Run the command: print the table, write demo.json and demo.png; return 0, or 1 if a rank failed."""
    options = _parse(argv)
    console = Console(stderr=options.json)
    runs = (PLAIN, *options.codecs)
    begin = time.monotonic()
    console.print(
        "A character-level GPT learns from the source of Python's standard library:\n"
        f"{options.nproc} ranks, {len(runs)} runs of {options.steps} steps, alternating.",
        highlight=False,
    )
    settings = Settings(runs=runs, steps=options.steps, seed=options.seed)
    results: dict[str, list[list[Result]]] = {}
    report = ""
    for link in dict.fromkeys((IN_MEMORY, options.link)):
        title = "in memory" if link == IN_MEMORY else f"over an emulated link of {describe_link(link)}"
        console.print(f"\n{title}", highlight=False)
        verified = "" if link == IN_MEMORY else _recommended(runs)
        try:
            outcomes = _train(settings, options.nproc, link, verified, console)
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        results[link] = [runs_of_rank for runs_of_rank, _ in outcomes]
        report = outcomes[0][1]
    seconds = time.monotonic() - begin
    summary = summarize(results, report, nproc=options.nproc, steps=options.steps, seconds=seconds)

    options.out.mkdir(parents=True, exist_ok=True)
    write_file(options.out / "demo.json", json.dumps(summary, indent=1) + "\n")
    write_plot(summary, options.out / "demo.png")
    if options.json:
        print(json.dumps(summary))
    print_summary(summary, console)
    console.print(f"\nWrote {options.out / 'demo.png'} and {options.out / 'demo.json'}")
    return 0


def _recommended(runs: tuple[str, ...]) -> str:
    """Return the codec whose figures the last lines are about."""
    compressed = [name for name in runs if name not in (PLAIN, "none")]
    return RECOMMENDED if RECOMMENDED in compressed else next(iter(compressed), "")


def describe_link(text: str) -> str:
    """Return a link as people write it: ``1 Gbit/s, 50 µs``; links with levels stay as they are."""
    link = emulated_link.parse(text, "--link").between
    if link is None or "=" in text:
        return text
    rate = link.bits_per_second / 1e9
    name = f"{rate:g} Gbit/s" if rate >= 1 else f"{rate * 1e3:g} Mbit/s"
    return f"{name}, {link.latency_s * 1e6:g} µs" if link.latency_s else name


def train_rank(
    rank: int, world_size: int, settings: Settings, verified: str
) -> tuple[list[dict[str, Any]], str]:
    """Train on one rank; rank 0 sends its progress to the main process.

    Returns the runs, and the report of further steps with the codec ``verified`` if it is not empty.
    """
    if rank:
        return train.train(settings), train.measure_payoff(settings, verified) if verified else ""
    try:
        runs = train.train(settings, lambda name, step, loss: send_to_parent((name, step, loss)))
        return runs, train.measure_payoff(settings, verified) if verified else ""
    finally:
        send_to_parent(None)


def _train(
    settings: Settings, nproc: int, link: str, verified: str, console: Console
) -> list[tuple[list[Result], str]]:
    """Train on all ranks with a progress bar for each run; return results by rank, then by run."""
    columns = (
        TextColumn("{task.description:>21}"),
        BarColumn(24),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    # Gloo cannot emulate a link, so there plain DDP reduces over dtcomm's backend, with the same bytes.
    backend = "gloo" if link == IN_MEMORY else "dtcomm"
    environment = {"DTCOMM_EMULATE_LINK": None if link == IN_MEMORY else link}
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bars = {name: progress.add_task(name, total=settings.steps, loss="  -  ") for name in settings.runs}
        with spawn_ranks(
            train_rank,
            nproc,
            settings,
            verified,
            backend=backend,
            fresh=True,
            env=environment,
            group_timeout=SILENCE_SECONDS,
        ) as ranks:
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
        description="Train a small language model with plain DDP and with compressed gradients, alternating: first in "
        "memory, then over an emulated link. Print what a step takes, and how compression changes the loss.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=120, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data order")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for demo.json and demo.png"
    )
    parser.add_argument(
        "--codecs", type=_codecs, default=CODECS, help="codecs to compare with plain DDP, separated by ','"
    )
    parser.add_argument(
        "--link",
        type=_link,
        default=LINK,
        help="the emulated link: a rate and a latency, as DTCOMM_EMULATE_LINK takes them, or 'none'",
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks; each is a process with one thread")
    parser.add_argument("--json", action="store_true", help="also print the JSON on standard output")
    options = parser.parse_args(argv)
    for name in ("steps", "nproc"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    return options


def _codecs(text: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(codec(spec)) for spec in split_codecs([text])))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _link(text: str) -> str:
    if text != IN_MEMORY:
        try:
            emulated_link.parse(text, "--link")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


Result = dict[str, Any]


def summarize(
    results: dict[str, list[list[Result]]], report: str, *, nproc: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Summarize ``results``, which are by link, rank and run.

    Losses are equal on all ranks. Bytes are means over ranks and times are the slowest rank's.
    """
    summary: dict[str, Any] = {"ranks": nproc, "steps": steps, "seconds": seconds, "link": None}
    for link, ranks in results.items():
        runs = [_summarize_run(run_by_rank) for run_by_rank in zip(*ranks, strict=True)]
        plain = runs[0]
        for run in runs:
            run["held_out_against_plain"] = run["final_held_out_loss"] / plain["final_held_out_loss"] - 1
            run["bytes_against_plain"] = run["bytes_per_step"] / plain["bytes_per_step"]
            run["step_against_plain"] = run["step_ms"] / plain["step_ms"]
        summary["runs" if link == IN_MEMORY else "runs_on_link"] = runs
        if link != IN_MEMORY:
            summary["link"] = link
    return summary | {"report": report}


def _summarize_run(ranks: Sequence[Result]) -> dict[str, Any]:
    """Summarize one run, given by rank."""
    of_all_ranks = ("name", "parameters", "gradient_bytes", "bytes_are", "report", "losses", "held_out")
    run = {key: ranks[0][key] for key in (*of_all_ranks, "final_training_loss", "final_held_out_loss")}
    run["step_ms"] = max(rank["step_ms"] for rank in ranks)
    run["step_seconds"] = [
        max(times) for times in zip(*(rank["step_seconds"] for rank in ranks), strict=True)
    ]
    run["bytes_per_step"] = statistics.fmean(rank["bytes_per_step"] for rank in ranks)
    return run


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Print the table, what a step takes on the link, and the report."""
    runs, on_link = summary["runs"], summary.get("runs_on_link")
    console.print(
        f"\n{summary['ranks']} ranks, {summary['steps']} steps, {runs[0]['parameters']:,} parameters, "
        f"{summary['seconds']:.0f} s",
        highlight=False,
    )
    heads = [">sent,\nMB/step", ">memory,\nms/step"]
    heads += [">link,\nms/step", ">gain on\nlink"] if on_link else []
    table = new_table(["gradients", *heads, ">held-out\nloss", ">vs.\nplain"], plain=True)
    for position, run in enumerate(runs):
        cells = [f"{run['bytes_per_step'] / 1e6:.2f}", f"{run['step_ms']:.1f}"]
        if on_link:
            there = on_link[position]
            cells += [f"{there['step_ms']:.1f}", f"{1 / there['step_against_plain']:.2f}x"]
        change = _change(run["held_out_against_plain"]) if position else ""
        table.add_row(run["name"], *cells, f"{run['final_held_out_loss']:.4f}", change)
    console.print(table)
    for line in _notes(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _notes(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the table: what its columns mean, what compression gains on the link, and the report."""
    runs, on_link = summary["runs"], summary.get("runs_on_link")
    yield "ms: the median step of the slowest rank. MB of plain DDP: computed, 2(n-1)/n of"
    yield "its gradients. Loss: in nats per character, of text that is not trained on."
    if not on_link:
        return
    yield f"link: {describe_link(summary['link'])}, emulated, for each rank. There plain DDP reduces through"
    yield "dtcomm's backend, since Gloo cannot emulate links."
    differing = [
        f"{there['name']} {there['final_held_out_loss']:.4f}"
        for run, there in zip(runs, on_link, strict=True)
        if run["final_held_out_loss"] != there["final_held_out_loss"]
    ]
    if differing:
        yield f"Held-out losses on the link: {', '.join(differing)}."
    else:
        yield "The losses on the link are the same, digit for digit."
    name = _recommended(tuple(run["name"] for run in runs))
    if not name:
        return
    position = [run["name"] for run in runs].index(name)
    ours, plain = on_link[position]["step_ms"], on_link[0]["step_ms"]
    yield ""
    yield f"A step takes {ours:.1f} ms with {name} instead of {plain:.1f} ms on this link: " + (
        f"{plain / ours:.2f} times as fast." if plain > ours else "no gain."
    )
    yield f"In memory it takes {runs[position]['step_ms']:.1f} ms instead of {runs[0]['step_ms']:.1f} ms."
    yield f"The held-out loss changes by {_change(on_link[position]['held_out_against_plain'])}."
    if summary["report"]:
        yield ""
        yield f"Its report with verify={train.PAIRS}, of {train.STEPS_TO_VERIFY} further steps on this link:"
        yield from summary["report"].rstrip().splitlines()


def _change(fraction: float) -> str:
    return f"{round(fraction, 4) + 0.0:+.2%}"  # no -0.00%


def write_plot(summary: dict[str, Any], path: Path) -> None:
    """Write a PNG of ``summary`` (see `summarize`): the losses over time, and the time of a step."""
    runs, on_link = summary["runs"], summary.get("runs_on_link")
    with styled_pyplot() as pyplot:
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(11.5, 4.6), layout="constrained", width_ratios=(1.5, 1)
        )
        where = f"on a link of {describe_link(summary['link'])}" if on_link else "in memory"
        _plot_losses(left, on_link or runs, where)
        _plot_steps(right, runs, on_link)
        figure.suptitle(
            f"Character-level GPT on Python's standard library: {runs[0]['parameters'] / 1e6:.1f} M "
            f"parameters, {summary['ranks']} ranks, {summary['steps']} steps",
            fontsize=12.5,
            x=0.01,
            ha="left",
        )
        save_figure(figure, path)
        pyplot.close(figure)


def _plot_losses(axes: Any, runs: list[dict[str, Any]], where: str) -> None:
    for position, run in enumerate(runs):
        seconds = [0.0, *accumulate(run["step_seconds"])]
        axes.plot(
            seconds[1:],
            _smooth(run["losses"]),
            color=COLOURS[position % len(COLOURS)],
            linewidth=2 if position == 0 else 1.5,
            label=f"{run['name']}: {run['final_held_out_loss']:.4f}",
        )
        steps, losses = zip(*run["held_out"], strict=True)
        axes.scatter(
            [seconds[step] for step in steps],
            losses,
            s=28,
            facecolors="none",
            edgecolors=COLOURS[position % len(COLOURS)],
            linewidths=1.3,
        )
    axes.set_ylabel("nats per character")
    axes.set_xlabel("seconds of training")
    axes.set_title(f"training loss (lines, smoothed) and held-out loss (rings) {where}")
    axes.grid(axis="y")
    axes.set_xlim(left=0)
    axes.legend(title="final held-out loss", framealpha=1, edgecolor="none", alignment="left")


def _plot_steps(axes: Any, runs: list[dict[str, Any]], on_link: list[dict[str, Any]] | None) -> None:
    """Plot the milliseconds of a step: on the link as filled bars, in memory as outlines below them."""
    shown = [(on_link, True)] if on_link else []
    shown.append((runs, False))
    largest = max(run["step_ms"] for group, _ in shown for run in group)
    height = 0.8 / len(shown)
    for row, (group, filled) in enumerate(shown):
        for position, run in enumerate(group):
            colour = COLOURS[position % len(COLOURS)]
            y = position + (row - (len(shown) - 1) / 2) * height
            style = {"color": colour} if filled else {"facecolor": "none", "edgecolor": colour}
            axes.barh(y, run["step_ms"], height=0.86 * height, **style)
            gain = f"  ({1 / run['step_against_plain']:.2f}x)" if position else ""
            axes.text(
                run["step_ms"] + 0.015 * largest, y, f"{run['step_ms']:.0f}{gain}", va="center", fontsize=9
            )
    axes.set_title("ms per step " + ("on the link (filled) and in memory" if on_link else "in memory"))
    axes.set_yticks(range(len(runs)), [run["name"].replace(":round=", "\n") for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * largest)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)


def _smooth(values: list[float], memory: float = 0.9) -> list[float]:
    """Return the exponential moving average with bias correction at the start."""
    smooth, weight, total = [], 0.0, 0.0
    for value in values:
        total = memory * total + (1 - memory) * value
        weight = memory * weight + (1 - memory)
        smooth.append(total / weight)
    return smooth
