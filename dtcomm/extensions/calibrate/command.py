"""Command ``dtcomm tp calibrate``: measures a codec for each layer, and writes a plan file for `dtcomm.tp.compress`."""

from __future__ import annotations

import argparse
import importlib
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtcomm.cli import show_progress, write_json
from dtcomm.extensions.calibrate.calibration import CANDIDATES, Batch, Calibration, calibrate
from dtcomm.profiling.summary import format_table
from dtcomm.tp.hf_transformers import from_folder
from dtcomm.tp.layer_plan import PLANS

CALIBRATE_HELP = """\
MODEL is a folder with a causal language model of transformers and its tokenizer, or package.module:function: a function
without arguments that returns a model, batches and, if there is no ready plan, a plan (name pattern -> kind of layer).
Batches are tokens [batch, length], or pairs of inputs and targets."""


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand; return 0, or 2 if an argument or a file is wrong."""
    parser = argparse.ArgumentParser(prog="dtcomm tp")
    commands = parser.add_subparsers(required=True, metavar="{calibrate}", dest="command")
    _add_calibrate(commands)
    options = parser.parse_args(argv)
    try:
        return run_calibration(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dtcomm tp calibrate: {error}", file=sys.stderr)
        return 2


def call_function(text: str) -> Any:
    """Return what the function of ``package.module:function`` returns; modules of the current folder are found too."""
    module, _, function = text.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"MODEL: {text}: {error}") from None
    return make()


def _wrote(path: Path) -> None:
    print(f"Wrote {path}: dtcomm.tp.compress(model, mesh, plan={str(path)!r})", file=sys.stderr)


def _add_calibrate(commands: Any) -> None:
    summary = "measure each layer in each codec and write a plan"
    description = "Measure the error of each codec in each layer of a model and write a plan file."
    command: argparse.ArgumentParser = commands.add_parser(
        "calibrate", help=summary, description=description, epilog=CALIBRATE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = command.add_argument
    add("model", metavar="MODEL", help="see below")
    add("--ranks", type=int, default=2, help="number of ranks that share each layer (2)")
    plans = ", ".join(PLANS)
    add("--plan", help=f"kinds of layers: {plans} or a .json file (default: by the model's type)")
    add("--codecs", nargs="+", default=list(CANDIDATES), help=f"candidates ({' '.join(CANDIDATES)})")
    add("--budget", type=float, default=1.0, help="largest increase of perplexity, in percent (1)")
    add("--text", type=Path, help="for a folder: the text to measure on (default: the source of Python)")
    add("--batches", type=int, default=4, help="number of batches to measure on (4)")
    add("--batch-size", type=int, default=4, help="for a folder: rows of a batch (4)")
    add("--length", type=int, default=128, help="for a folder: tokens per row (128)")
    add("--out", type=Path, default=Path("tp-plan.json"), help="the plan file (tp-plan.json)")
    add("--json", metavar="FILE", help="write all figures as JSON; - writes to standard output")
    add("--quiet", action="store_true", help="no progress")


def run_calibration(options: argparse.Namespace) -> int:
    """Measure the layers of a model, write the plan, and show the figures."""
    model, batches, plan = _load(options)

    def progress(done: int, total: int) -> None:
        if not options.quiet and options.json != "-":
            show_progress(f"measuring: {done} of {total}" if done < total else "")

    limits = {"codecs": options.codecs, "budget": options.budget / 100, "progress": progress}
    calibration = calibrate(model, batches, options.ranks, options.plan or plan, **limits)
    calibration.write(options.out)
    entries = calibration.layers.items()
    layers = {name: {"kind": entry.kind, "codec": entry.codec} for name, entry in entries}
    if write_json({**calibration.to_dict(), "layers": layers}, options.json, allow_nan=True):
        show(calibration)
    _wrote(options.out)
    return 0


def _load(options: argparse.Namespace) -> tuple[nn.Module, Sequence[Batch], Any]:
    if ":" not in options.model:
        text = options.text.read_text(encoding="utf-8") if options.text else _python_source()
        sizes = {"batches": options.batches, "size": options.batch_size, "length": options.length}
        model, batches = from_folder(options.model, text, **sizes)
        return model, batches, None
    result = call_function(options.model)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        got = type(result).__name__
        raise ValueError(f"MODEL: {options.model} returned {got}; expected model, batches[, plan]")
    batches = list(result[1])[: options.batches]
    if not all(isinstance(batch, (torch.Tensor, tuple)) for batch in batches):
        expected = "tensors or pairs of inputs and targets"
        raise ValueError(f"MODEL: {options.model}: returned other batches; expected {expected}")
    return result[0], batches, result[2] if len(result) == 3 else None


def _python_source() -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


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
    """Print errors and changes of perplexity of each layer in each codec, the chosen codecs, and a summary."""
    specs = [spec for spec in calibration.bits if spec != "none"]
    head = ["layer", *(f"{spec} ({calibration.bits[spec]:.3g} bits)" for spec in specs), "plan"]
    rows = []
    for name, errors in calibration.errors.items():
        shown = [errors[spec] for spec in specs]
        cells = [f"{100 * error.relative:.2g} % / {100 * error.perplexity:+.2g} %" for error in shown]
        rows.append([name, *cells, str(calibration.layers[name].codec)])
    print("relative error of a layer's output / change of perplexity, only that layer compressed")
    print("\n".join([*format_table(head, rows, left=(0, len(head) - 1)), *plan_summary(calibration)]))
