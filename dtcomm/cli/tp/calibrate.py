"""Command ``dtcomm tp calibrate``: choose a codec for each layer of a model, measured on a few batches.

The result is a plan file for `dtcomm.tp.compress`. `dtcomm.tp.calibrate` measures and chooses; this module has the
command line, the table and the plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtcomm.cli._common import COLOURS, styled_pyplot
from dtcomm.cli.tp.model_argument import call_function
from dtcomm.tp.calibrate import CANDIDATES, Batch, Calibration, calibrate
from dtcomm.tp.hf_transformers import from_folder
from dtcomm.tp.layer_plan import PLANS

HELP = """\
MODEL is a folder with a causal language model of transformers and its tokenizer, or package.module:function: a function
without arguments that returns a model, batches and, if there is no ready plan, a plan (name pattern -> kind of layer).
Batches are tokens [batch, length], or pairs of inputs and targets."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command's arguments to the subcommands of ``dtcomm tp``."""
    command: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="measure each layer in each codec and write a plan",
        description="Measure the error of each codec in each layer of a model and write a plan file.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "model", metavar="MODEL", help="a folder of transformers, or package.module:function; see below"
    )
    command.add_argument("--ranks", type=int, default=2, help="number of ranks that share each layer (2)")
    command.add_argument(
        "--plan", help=f"kinds of layers: {', '.join(PLANS)} or a .json file (default: by the model's type)"
    )
    command.add_argument(
        "--codecs", nargs="+", default=list(CANDIDATES), help=f"candidates ({' '.join(CANDIDATES)})"
    )
    command.add_argument(
        "--budget", type=float, default=1.0, help="largest increase of perplexity, in percent (1)"
    )
    command.add_argument(
        "--text", type=Path, help="for a folder: the text to measure on (default: the source of Python)"
    )
    command.add_argument("--batches", type=int, default=4, help="number of batches to measure on (4)")
    command.add_argument("--batch-size", type=int, default=4, help="for a folder: rows of a batch (4)")
    command.add_argument("--length", type=int, default=128, help="for a folder: tokens per row (128)")
    command.add_argument(
        "--out", type=Path, default=Path("tp-plan.json"), help="the plan file (tp-plan.json)"
    )
    command.add_argument(
        "--json", metavar="FILE", help="write all figures as JSON; - writes to standard output"
    )
    command.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the divergence of the logits for each layer and codec"
    )
    command.add_argument("--quiet", action="store_true", help="no progress")
    return command


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0, or 2 if an argument or a file is wrong."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("dtcomm tp calibrate: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    try:
        model, batches, plan = _load(options)
        with _progress(options.quiet or options.json == "-") as progress:
            calibration = calibrate(
                model,
                batches,
                options.ranks,
                options.plan or plan,
                codecs=options.codecs,
                budget=options.budget / 100,
                progress=progress,
            )
        calibration.write(options.out)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dtcomm tp calibrate: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        layers = {
            name: {"kind": entry.kind, "codec": entry.codec} for name, entry in calibration.layers.items()
        }
        text = json.dumps({**calibration.to_dict(), "layers": layers}, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if options.json != "-":
        show(calibration)
    if options.plot is not None:
        plot(calibration, options.plot)
        print(f"Wrote {options.plot}", file=sys.stderr)
    print(f"Wrote {options.out}: dtcomm.tp.compress(model, mesh, plan={str(options.out)!r})", file=sys.stderr)
    return 0


def _load(options: argparse.Namespace) -> tuple[nn.Module, Sequence[Batch], Any]:
    if ":" not in options.model:
        text = options.text.read_text(encoding="utf-8") if options.text else _python_source()
        sizes = {"batches": options.batches, "size": options.batch_size, "length": options.length}
        model, batches = from_folder(options.model, text, **sizes)
        return model, batches, None
    result = call_function(options.model)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise ValueError(
            f"MODEL: {options.model} returned {type(result).__name__}; expected model, batches[, plan]"
        )
    batches = list(result[1])[: options.batches]
    if not all(isinstance(batch, (torch.Tensor, tuple)) for batch in batches):
        raise ValueError(
            f"MODEL: {options.model}: returned other batches; expected tensors or pairs of inputs and targets"
        )
    return result[0], batches, result[2] if len(result) == 3 else None


def _python_source() -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


@contextmanager
def _progress(quiet: bool) -> Any:
    """Yield a function of (done, total) that shows progress on a terminal."""
    ignore: Callable[[int, int], None] = lambda done, total: None  # noqa: E731
    if quiet or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield ignore
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table_rows(calibration: Calibration) -> tuple[list[str], list[list[str]]]:
    """Return columns and a row for each layer: error and change of perplexity in each codec, and the chosen codec."""
    specs = [spec for spec in calibration.bits if spec != "none"]
    rows = []
    for name, errors in calibration.errors.items():
        cells = [
            f"{100 * errors[spec].relative:.2g} % / {100 * errors[spec].perplexity:+.2g} %" for spec in specs
        ]
        rows.append([name, *cells, str(calibration.layers[name].codec)])
    return ["layer", *(f"{spec} ({calibration.bits[spec]:.3g} bits)" for spec in specs), "plan"], rows


def plan_summary(calibration: Calibration) -> list[str]:
    """Return sentences that describe the plan."""
    change = calibration.plan_error
    sentences = [
        f"{calibration.ranks} ranks, {calibration.tokens} tokens, "
        f"uncompressed perplexity {calibration.perplexity:.4f}; with the plan "
        f"{100 * change.perplexity:+.3f} % (budget {100 * calibration.budget:g} %), logits diverge by "
        f"{change.divergence:.3g} nats per token.",
        f"{calibration.mean_bits:.2f} bits per element on the wire, mean over layers; "
        f"{calibration.bits['none']:g} uncompressed.",
    ]
    spent = {name: calibration.bits[str(calibration.layers[name].codec)] for name in calibration.errors}
    widest = [name for name, bits in spent.items() if bits == max(spent.values())]
    if not calibration.high_precision and len(widest) < len(spent):
        sentences.append(f"Widest codec, for the most sensitive layers: {', '.join(widest)}.")
    if calibration.high_precision:
        sentences.append(f"Kept at high precision: {', '.join(calibration.high_precision)}.")
    return sentences


def show(calibration: Calibration) -> None:
    """Print the table and the summary of the plan."""
    columns, rows = table_rows(calibration)
    title = "relative error of a layer's output / change of perplexity, only that layer compressed"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
        print(title)
        for row in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    else:
        shown = Table(title=title, title_justify="left")
        for at, column in enumerate(columns):
            shown.add_column(column, justify="right" if 0 < at < len(columns) - 1 else "left")
        for row in rows:
            shown.add_row(*row)
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(shown)
    print("\n".join(plan_summary(calibration)))


def plot(calibration: Calibration, path: Path) -> None:
    """Plot the divergence of the logits for each layer and codec, with rings around the plan's choices."""
    names = list(calibration.errors)
    with styled_pyplot() as pyplot:
        figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.28 * len(names)), layout="constrained")
        for colour, spec in zip(COLOURS[1:] * 3, [spec for spec in calibration.bits if spec != "none"]):
            values = [max(calibration.errors[name][spec].divergence, 1e-9) for name in names]
            axes.scatter(values, range(len(names)), s=26, color=colour, label=spec, zorder=3)
            chosen: list[Any] = [
                (value, at)
                for at, (name, value) in enumerate(zip(names, values, strict=True))
                if calibration.layers[name].codec == spec
            ]
            if chosen:
                across, down = zip(*chosen, strict=True)
                axes.scatter(across, down, s=110, facecolors="none", edgecolors=colour, zorder=3)
        axes.set_xscale("log")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=True)
        axes.set_xlabel("divergence of the logits, nats per token, only that layer compressed")
        axes.set_title(
            f"rings: the plan within {100 * calibration.budget:g} % of perplexity, {calibration.ranks} ranks"
        )
        figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
