"""Command ``dtcomm codecs``: the size, error and speed of each codec, on random samples and on your own tensors.

`measure` takes the measurements and `report` prints and plots them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dtcomm.cli._common import count_argument, size_argument, split_codecs
from dtcomm.cli.codecs import measure as codecs_measure
from dtcomm.cli.codecs import report
from dtcomm.cli.codecs.measure import OnDevice
from dtcomm.cli.perf import placement
from dtcomm.cli.perf.args import add_import_argument, import_modules
from dtcomm.codecs import Codec, codec, names
from dtcomm.codecs.spec import VARIABLE_LENGTH
from dtcomm.measure import device as device_info

#: Options shown in addition to the defaults, by codec name.
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": ("round=stochastic",),
    "int8": ("block=256", "symmetric=false", "round=stochastic"),
    "int4": (
        "block=128",
        "symmetric=false",
        "round=stochastic",
        "rotate=hadamard",
        "spikes=1",
        "block=128,rotate=hadamard",
        "block=128,spikes=1",
    ),
    "int3": ("symmetric=false", "rotate=hadamard", "block=128,rotate=hadamard", "block=128,spikes=1"),
    "int2": (
        "symmetric=false",
        "symmetric=false,rotate=hadamard",
        "symmetric=false,spikes=1",
        "block=128,symmetric=false,rotate=hadamard",
        "block=128,symmetric=false,spikes=1",
    ),
    "fp8_e4m3": ("round=stochastic",),
    "fp8_e3m4": ("round=stochastic",),
    "mxfp8": ("element=e5m2",),
    "mxfp4": ("rotate=hadamard",),
    "intv": ("width=4",),
    "sign": ("rotate=hadamard",),
    "topk": ("ratio=0.1", "ratio=0.1,values=int8"),
    "randk": ("ratio=0.1", "positions=shared"),
    "exact": ("bits=16",),
}


def default_codecs() -> list[Codec]:
    """Return the codecs that are shown if the user names none: all, with `VARIANTS`, and those of ``--import``."""
    fixed = [
        codec(spec)
        for name in names()
        for spec in (name, *(f"{name}:{options}" for options in VARIANTS.get(name, ())))
    ]
    return [*fixed, *VARIABLE_LENGTH.values()]


def select_codecs(only: Sequence[Codec], also: Sequence[Codec]) -> list[Codec]:
    """Return ``only``, or the default codecs if it is empty, followed by ``also``, without duplicates."""
    return list(dict.fromkeys([*(only or default_codecs()), *also]))


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
        samples = codecs_measure.distributions(options.numel)
        samples += [codecs_measure.load_sample(path) for path in options.tensor]
    except ValueError as error:
        print(f"dtcomm codecs: {error}", file=sys.stderr)
        return 2
    codecs = select_codecs(options.codec, options.also)
    size = None if options.no_speed else options.size
    device, facts = None, None
    if options.device == placement.CUDA:
        gpu = torch.device("cuda", torch.cuda.current_device())
        device, facts = OnDevice(gpu), device_info.describe_gpu(gpu)
    with _progress(len(codecs)) as step:
        rows = codecs_measure.measure_codecs(codecs, samples, size, step, device)

    if options.json is not None:
        text = json.dumps(report.as_dict(rows, size, facts), indent=1, allow_nan=False) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    if options.json != "-":
        console = Console()
        console = Console(width=max(console.width, WIDTH) if console.is_terminal else PIPE_WIDTH)
        report.print_table(rows, console, size, facts["name"] if facts else "")
        if options.per_tensor and rows[0].tensors:
            report.print_tensor_table(rows, console)
    if options.plot is not None:
        report.plot(rows, options.plot)
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
    add_import_argument(add)
    add("--codec", metavar="SPEC", action="append", default=[],
        help="show only this codec; repeated or a,b")  # fmt: skip
    add("--also", metavar="SPEC", action="append", default=[],
        help="show this codec in addition; repeated or a,b")  # fmt: skip
    add("--tensor", metavar="FILE", type=Path, action="append", default=[],
        help="also measure the error on the tensors of a .pt or .npy file; may be repeated")  # fmt: skip
    add("--per-tensor", action="store_true", help="also print a line for each tensor of a file with several")
    add("--no-speed", action="store_true", help="do not measure speed")
    add("--device", choices=(placement.CPU, placement.CUDA), default=placement.CPU,
        help="measure the speed of one core (default), or of a GPU, with the share of the memory floor")  # fmt: skip
    add("--size", metavar="SIZE", type=size_argument(4),
        help="bytes of fp32 for the speed measurement (default 4M, on a GPU 64M; K, M and G are "
        "powers of 1024)")  # fmt: skip
    add("--numel", metavar="N", type=count_argument(1), default=codecs_measure.NUMEL,
        help=f"elements of each distribution (default {codecs_measure.NUMEL})")  # fmt: skip
    add("--plot", metavar="FILE", type=Path, nargs="?", const=Path("codecs.png"),
        help="plot error against bits per element (default codecs.png)")  # fmt: skip
    add("--json", metavar="FILE", nargs="?", const="-", help="write JSON: to FILE, or instead of the table")
    options = parser.parse_args(argv)
    try:
        import_modules(options.imports)
    except ValueError as error:
        parser.error(str(error))
    for name in ("codec", "also"):
        try:
            setattr(options, name, [codec(spec) for spec in split_codecs(getattr(options, name))])
        except ValueError as error:
            parser.error(f"argument --{name}: {error}")
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
