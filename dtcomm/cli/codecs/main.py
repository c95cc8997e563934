"""Command ``dtcomm codecs``: the size, error and speed of each codec, on random samples and on your own tensors.

`presets` has the list of codecs, `samples` the inputs, `error` and `speed` the measurements, `report` and `plot` the
output.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dtcomm.cli._sizes import count_argument, size_argument
from dtcomm.cli.codecs import plot, presets, report
from dtcomm.cli.codecs import samples as codecs_samples
from dtcomm.cli.codecs.speed import OnDevice
from dtcomm.cli.perf import placement
from dtcomm.codecs import Codec, codec
from dtcomm.measure import gpu_info

WIDTH = 112  # least columns of the table; a narrower terminal wraps its lines
SIZES = {
    placement.CPU: 4 << 20,
    placement.CUDA: 64 << 20,
}  # bytes; smaller tensors are too short to time on a GPU
PIPE_WIDTH = 400  # columns if the output is not a terminal


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 if a file is wrong."""
    options = _parse(argv)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("dtcomm codecs: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    try:
        samples = codecs_samples.distributions(options.numel)
        samples += [codecs_samples.load(path) for path in options.tensor]
    except ValueError as error:
        print(f"dtcomm codecs: {error}", file=sys.stderr)
        return 2
    codecs = presets.select_codecs(options.codec, options.also)
    size = None if options.no_speed else options.size
    device, facts = None, None
    if options.device == placement.CUDA:
        gpu = torch.device("cuda", torch.cuda.current_device())
        device, facts = OnDevice(gpu), gpu_info.describe_gpu(gpu)
    with _progress(len(codecs)) as step:
        rows = report.measure(codecs, samples, size, step, device)

    if options.json is not None:
        text = json.dumps(report.as_dict(rows, size, facts), indent=1, allow_nan=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    if options.json != "-":
        console = Console()
        console = Console(width=max(console.width, WIDTH) if console.is_terminal else PIPE_WIDTH)
        report.show(rows, console, size, facts["name"] if facts else "")
        if options.per_tensor and rows[0].tensors:
            report.show_tensors(rows, console)
    if options.plot is not None:
        plot.plot(rows, options.plot)
        print(f"Wrote {options.plot}", file=sys.stderr)
    return 0


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances a progress bar on stderr; without a terminal it does nothing."""
    columns = (TextColumn("{task.description:<36}"), BarColumn(40), MofNCompleteColumn())
    console = Console(stderr=True)
    # No refresh thread, which would disturb the measurement.
    bar = Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task("", total=count)
        done = iter(range(count))
        yield lambda what: bar.update(task, description=what, completed=next(done), refresh=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dtcomm codecs",
        description="Measure the size, error and speed of each codec.",
        epilog="docs/guides/codecs.md says when to use which codec.",
    )
    add = parser.add_argument
    add("--codec", metavar="SPEC", type=_codec, action="append", default=[],
        help="show only this codec; may be repeated")  # fmt: skip
    add("--also", metavar="SPEC", type=_codec, action="append", default=[],
        help="show this codec in addition; may be repeated")  # fmt: skip
    add("--tensor", metavar="FILE", type=Path, action="append", default=[],
        help="also measure the error on the tensors of a .pt or .npy file; may be repeated")  # fmt: skip
    add("--per-tensor", action="store_true", help="also print a line for each tensor of a file with several")
    add("--no-speed", action="store_true", help="do not measure speed")
    add("--device", choices=(placement.CPU, placement.CUDA), default=placement.CPU,
        help="measure the speed of one core (default), or of a GPU, with the share of the memory floor")  # fmt: skip
    add("--size", metavar="SIZE", type=size_argument(4),
        help="bytes of fp32 for the speed measurement (default 4M, on a GPU 64M; K, M and G are "
        "powers of 1024)")  # fmt: skip
    add("--numel", metavar="N", type=count_argument(1), default=codecs_samples.NUMEL,
        help=f"elements of each distribution (default {codecs_samples.NUMEL})")  # fmt: skip
    add("--plot", metavar="FILE", type=Path, nargs="?", const=Path("codecs.png"),
        help="plot error against bits per element (default codecs.png)")  # fmt: skip
    add("--json", metavar="FILE", nargs="?", const="-", help="write JSON: to FILE, or instead of the table")
    options = parser.parse_args(argv)
    for name in ("plot", "json"):
        target = getattr(options, name)
        if target not in (None, "-") and not Path(target).absolute().parent.is_dir():
            parser.error(f"--{name} {target}: there is no folder {Path(target).parent}")
    if options.size is None:
        options.size = SIZES[options.device]
    if options.device == placement.CUDA and not placement.cuda_available():
        parser.error("--device cuda: torch sees no CUDA device; valid: cpu")
    if options.device == placement.CUDA and options.no_speed:
        parser.error("--no-speed: not valid with --device cuda, which only measures speed")
    if options.per_tensor and not options.tensor:
        parser.error("--per-tensor: needs --tensor FILE")
    return options


def _codec(text: str) -> Codec:
    try:
        return codec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
