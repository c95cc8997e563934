"""``dtcomm tp calibrate``: which codec each layer of a model can bear, measured on a few batches, as a plan file.

To read on: dtcomm.tp.calibrate (the measurement and the choice), tp_report (what is shown).
"""

from __future__ import annotations

import argparse
import importlib
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

from dtcomm.cli import tp_report
from dtcomm.tp.calibrate import CANDIDATES, Batch, calibrate
from dtcomm.tp.hf_transformers import from_folder
from dtcomm.tp.layer_plan import PLANS

HELP = """\
MODEL is a folder with a causal language model of transformers and its tokenizer, or package.module:function, a function
without arguments that returns a model, batches, and, where it has no ready plan, a plan: name pattern -> kind.
Batches are tokens [batch, length], or pairs of inputs and targets."""


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table or the JSON, write the plan and the plot; 2 where an argument or a file is wrong."""
    parser = argparse.ArgumentParser(prog="dtcomm tp")
    commands = parser.add_subparsers(required=True, metavar="calibrate")
    ours = commands.add_parser(
        "calibrate",
        help="measure each layer in each codec and write a plan",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("model", metavar="MODEL")
    ours.add_argument("--ranks", type=int, default=2, help="that share each layer (2)")
    ours.add_argument(
        "--plan", help=f"kinds of layers: {', '.join(PLANS)} or a .json file (by the model's type)"
    )
    ours.add_argument(
        "--codecs", nargs="+", default=list(CANDIDATES), help=f"candidates ({' '.join(CANDIDATES)})"
    )
    ours.add_argument(
        "--budget", type=float, default=1.0, help="the most that perplexity may rise, in per cent (1)"
    )
    ours.add_argument("--text", type=Path, help="for a folder: the text to measure on (Python's own source)")
    ours.add_argument("--batches", type=int, default=4)
    ours.add_argument("--batch-size", type=int, default=4)
    ours.add_argument("--length", type=int, default=128, help="tokens a row, for a folder")
    ours.add_argument("--out", type=Path, default=Path("tp-plan.json"), help="the plan file (tp-plan.json)")
    ours.add_argument("--json", metavar="FILE", help="all figures; - is standard output")
    ours.add_argument("--plot", type=Path, metavar="FILE")
    ours.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(argv)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("dtcomm tp calibrate: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    try:
        model, batches, plan = _load(options)
        with _progress(options.quiet or options.json == "-") as progress:
            found = calibrate(
                model,
                batches,
                options.ranks,
                options.plan or plan,
                codecs=options.codecs,
                budget=options.budget / 100,
                progress=progress,
            )
        found.write(options.out)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dtcomm tp calibrate: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        told = {**found.to_dict(), "layers": {name: entry._asdict() for name, entry in found.layers.items()}}
        text = json.dumps(told, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")
    if options.json != "-":
        tp_report.show(found)
    if options.plot is not None:
        tp_report.plot(found, options.plot)
        print(f"Wrote {options.plot}", file=sys.stderr)
    print(f"Wrote {options.out}: dtcomm.tp.compress(model, mesh, plan={str(options.out)!r})", file=sys.stderr)
    return 0


def _load(options: argparse.Namespace) -> tuple[nn.Module, Sequence[Batch], Any]:
    module, colon, function = options.model.partition(":")
    if not colon:
        text = options.text.read_text(encoding="utf-8") if options.text else _own_text()
        sizes = {"batches": options.batches, "size": options.batch_size, "length": options.length}
        model, batches = from_folder(options.model, text, **sizes)
        return model, batches, None
    sys.path.insert(0, "")
    try:
        made: Any = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"MODEL: {options.model}: {error}") from None
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ValueError(
            f"MODEL: {options.model} returned {type(made).__name__}; expected model, batches[, plan]"
        )
    batches = list(made[1])[: options.batches]
    if not all(isinstance(batch, (torch.Tensor, tuple)) for batch in batches):
        raise ValueError(f"MODEL: {options.model}: batches are tensors, or pairs of inputs and targets")
    return made[0], batches, made[2] if len(made) == 3 else None


def _own_text() -> str:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


@contextmanager
def _progress(quiet: bool) -> Any:
    """A function of (done, total)."""
    nothing: Callable[[int, int], None] = lambda done, total: None  # noqa: E731
    if quiet or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield nothing
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
