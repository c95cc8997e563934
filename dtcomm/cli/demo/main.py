"""Command ``dtcomm demo``: train a small language model with plain DDP and with compressed gradients.

The ranks are processes of this machine; the main process shows their progress and writes the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dtcomm.cli.demo import plot, report
from dtcomm.cli.demo.train import PLAIN, Settings, train
from dtcomm.codecs import codec
from dtcomm.launch.ranks import RankError, RankTimeout, send_to_parent, spawn_ranks

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
    summary = report.summarise(
        results, nproc=options.nproc, steps=options.steps, seconds=time.monotonic() - begin
    )

    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot.plot(summary, options.out / "demo.png")
    if options.json:
        print(json.dumps(summary))
    report.show(summary, console)
    console.print(f"\nWrote {options.out / 'demo.png'} and {options.out / 'demo.json'}")
    return 0


def train_rank(rank: int, world_size: int, settings: Settings) -> list[dict[str, Any]]:
    """Train on one rank; rank 0 sends its progress to the main process."""
    if rank:
        return train(settings)
    try:
        return train(settings, lambda name, step, loss: send_to_parent((name, step, loss)))
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
        "--codecs",
        type=_codecs,
        default=CODECS,
        help="codecs to compare with plain DDP, separated by ','; use ';' if a spec has commas",
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks; each is a process with one thread")
    parser.add_argument("--json", action="store_true", help="also print the JSON on standard output")
    options = parser.parse_args(argv)
    for name in ("steps", "seeds", "nproc"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    return options


def _codecs(text: str) -> list[str]:
    specs = [part.strip() for part in text.split(";" if ";" in text else ",") if part.strip()]
    try:
        return list(dict.fromkeys(str(codec(spec)) for spec in specs))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
