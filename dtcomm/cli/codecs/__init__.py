"""Command ``dtcomm codecs``: the size, error and speed of each codec, on random samples and on your own tensors.

`measure` takes the measurements; this file has the arguments, the tables, the JSON values and the plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dtcomm import measure as device_info
from dtcomm.cli import (
    GREY,
    INK,
    count_argument,
    new_table,
    show_progress,
    size_argument,
    split_codecs,
    styled_pyplot,
    write_json,
)
from dtcomm.cli.codecs import measure as codecs_measure
from dtcomm.cli.codecs.measure import CodecRow, Error, OnDevice
from dtcomm.cli.perf import placement
from dtcomm.cli.perf.args import add_import_argument, import_modules
from dtcomm.codecs import Codec, codec, names
from dtcomm.codecs.spec import TIERS, VARIABLE_LENGTH, tier
from dtcomm.kernels import available, current
from dtcomm.measure.memory_floor import REDUCED_PAYLOADS
from dtcomm.system import save_figure

VERSION = 1  # of the JSON
SUM = f"reduce {REDUCED_PAYLOADS}"  # the reduction whose share of the memory floor the table shows
MARKERS = "osD^vP*X<>ph8d"
WIDTH = 112  # least columns of the table; a narrower terminal wraps its lines
#: In bytes; smaller tensors are too short to time on a GPU.
SIZES = {placement.CPU: 4 << 20, placement.CUDA: 64 << 20}
PIPE_WIDTH = 400  # columns if the output is not a terminal
#: Options shown in addition to the defaults, by codec name; a space separates variants.
VARIANTS = {
    "bf16": "round=stochastic",
    "int8": "block=256 symmetric=false round=stochastic",
    "int4": "block=128 symmetric=false round=stochastic rotate=hadamard spikes=1 "
    "block=128,rotate=hadamard block=128,spikes=1",
    "int3": "symmetric=false rotate=hadamard block=128,rotate=hadamard block=128,spikes=1",
    "int2": "symmetric=false symmetric=false,rotate=hadamard symmetric=false,spikes=1 "
    "block=128,symmetric=false,rotate=hadamard block=128,symmetric=false,spikes=1",
    "fp8_e4m3": "round=stochastic",
    "fp8_e3m4": "round=stochastic",
    "mxfp8": "element=e5m2",
    "mxfp4": "rotate=hadamard",
    "intv": "width=4",
    "sign": "rotate=hadamard",
    "topk": "ratio=0.1 ratio=0.1,values=int8",
    "randk": "ratio=0.1 positions=shared",
    "exact": "bits=16",
}


def default_codecs() -> list[Codec]:
    """Return the codecs that are shown if the user names none: all, with `VARIANTS`, and those of ``--import``.

    They are sorted by tier, and within the first one as it lists them.
    """
    variants = [(name, options) for name in names() for options in ("", *VARIANTS.get(name, "").split())]
    fixed = [codec(f"{name}:{options}" if options else name) for name, options in variants]
    order = [spec for specs in TIERS.values() for spec in specs]
    first = [codec(spec) for spec in next(iter(TIERS.values()))]
    rest = sorted(
        [*fixed, *VARIABLE_LENGTH.values()],
        key=lambda one: (list(TIERS).index(tier(str(one))), _position(order, str(one))),
    )
    return [*first, *(one for one in rest if one not in first)]


def _position(order: Sequence[str], spec: str) -> int:
    """Return where the name of a codec stands in ``order``; the end if it does not."""
    name = spec.partition(":")[0]
    return order.index(name) if name in order else len(order)


def select_codecs(only: Sequence[Codec], also: Sequence[Codec]) -> list[Codec]:
    """Return ``only``, or the default codecs if it is empty, followed by ``also``, without duplicates."""
    return list(dict.fromkeys([*(only or default_codecs()), *also]))


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
    number = itertools.count(1)

    def step(spec: str) -> None:
        show_progress(f"{next(number)} of {len(codecs)}: {spec}")

    rows = codecs_measure.measure_codecs(codecs, samples, size, step, device)
    show_progress()
    if write_json(as_dict(rows, size, facts), options.json):
        console = Console()
        console = Console(width=max(console.width, WIDTH) if console.is_terminal else PIPE_WIDTH)
        print_table(rows, console, size, facts["name"] if facts else "")
        if options.per_tensor and rows[0].tensors:
            print_tensor_table(rows, console)
    if options.plot is not None:
        plot(rows, options.plot)
        print(f"Wrote {options.plot}", file=sys.stderr)
    return 0


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


def as_dict(
    rows: Sequence[CodecRow], size: int | None, gpu_facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return JSON values; speeds in GB/s of fp32, missing values null, and facts about the measured GPU."""
    return {
        "version": VERSION,
        "kernel": current() if gpu_facts is None else ", ".join(available("cuda")),
        "speed_bytes": size,
        "device": gpu_facts,
        "versions": device_info.versions(),
        "codecs": [_row(row) for row in rows],
    }


def _row(row: CodecRow) -> dict[str, Any]:
    document = {
        "codec": row.spec,
        "tier": tier(row.spec),
        "family": row.family,
        "bits_per_element": row.bits_per_element,
        "block": row.block,
        "encode_gbps": None if row.speed is None else round(row.speed.encode, 3),
        "decode_gbps": None if row.speed is None else round(row.speed.decode, 3),
        "errors": {name: asdict(error) for name, error in row.errors.items()},
    }
    if row.speed is not None and row.speed.of_floor:
        document["of_floor"] = {verb: round(share, 4) for verb, share in row.speed.of_floor.items()}
    if row.no_speed:
        document["no_speed"] = row.no_speed
    if row.tensors:
        document["tensors"] = {name: asdict(error) for name, error in row.tensors.items()}
    return document


def print_table(rows: Sequence[CodecRow], console: Console, size: int | None, device: str = "") -> None:
    """Print the table and its legend; ``device`` is the name of the measured GPU."""
    samples = list(rows[0].errors)
    detailed = samples[-1]  # the user's tensors if any, else the hardest sample
    heads = ["bits per\nelement", "block"]
    heads += [] if size is None else ["encode\nGB/s", "decode\nGB/s"]
    heads += ["of floor:\nencode", "\ndecode", f"\n{SUM}"] if size is not None and device else []
    heads += [f"error on\n{name}" for name in samples] + ["worst\nblock", "1 - cosine"]
    # On a narrow terminal names are folded, not numbers.
    table = new_table(["~codec", *(f">{head}" for head in heads)], plain=True)
    titles = {row.spec: tier(row.spec) for row in rows}
    headed = [title for title, _ in itertools.groupby(titles.values())]
    shown = "" if 1 < len(headed) == len(set(headed)) else None  # codecs that the user named may alternate
    for row in rows:
        if shown is not None and titles[row.spec] != shown:
            shown = titles[row.spec]
            table.add_row(f"[bold]{shown}[/bold]")
        cells = [f"{row.bits_per_element:.3g}", str(row.block)]
        if row.speed is None and size is not None:
            cells += ["-"] * (5 if device else 2)
        if row.speed is not None:
            cells += [f"{row.speed.encode:.3g}", f"{row.speed.decode:.3g}"]
        if row.speed is not None and device:
            cells += [f"{row.speed.of_floor[verb]:.2f}" for verb in ("encode", "decode", SUM)]
        cells += [_number(row.errors[name].relative_l2) for name in samples]
        table.add_row(row.spec, *cells, *_worst_block_and_cosine(row.errors[detailed]))
    console.print(table)
    speed = "" if size is None else f"GB/s: fp32, one core, {size / 2**20:g} MiB, kernel {current()}. "
    if size is not None and device:
        speed = (
            f"GB/s: fp32, {device}, {size / 2**20:g} MiB. Of floor: the time of a "
            "device copy of the bytes that the kernel must read and write, over the kernel's time. "
        )
    legend = (
        f"error: |x - y| / |x| of input and decoded output, with fixed seeds. {speed}"
        f"Worst block and cosine: on {detailed}; blocks are the codec's, or of 32 elements if it has none."
    )
    console.print(textwrap.fill(legend, width=110), highlight=False)
    for row in rows:
        if row.no_speed:
            console.print(f"no speed of {row.spec}: {row.no_speed}", highlight=False, markup=False)


def print_tensor_table(rows: Sequence[CodecRow], console: Console) -> None:
    """Print one line for each tensor of the user's file and each codec."""
    numbers = (">elements", ">bits per\nelement", ">error", ">worst\nblock", ">1 - cosine")
    table = new_table(["~tensor", "~codec", *numbers], plain=True)
    for name in rows[0].tensors:
        for row in rows:
            error = row.tensors[name]
            sizes = (f"{error.numel:,}", f"{8 * error.wire_bytes / error.numel:.3g}")
            cells = (*sizes, _number(error.relative_l2), *_worst_block_and_cosine(error))
            table.add_row(name if row is rows[0] else "", row.spec, *cells)
    console.print(table)


def _worst_block_and_cosine(error: Error) -> tuple[str, str]:
    cosine = None if error.cosine is None else max(0.0, 1 - error.cosine)
    return _number(error.worst_block), _number(cosine)


def _number(value: float | None) -> str:
    """Return three significant digits, or a dash for a missing value."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-3 else f"{value:.3g}"


def pareto_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (bits, error) that no other point beats in both coordinates, by increasing bits."""
    front: list[tuple[float, float]] = []
    for bits, error in sorted(set(points)):
        if not front or error < front[-1][1]:
            if front and front[-1][0] == bits:
                front.pop()
            front.append((bits, error))
    return front


def plot(rows: Sequence[CodecRow], path: Path) -> None:
    """Write a plot in the format of the path's extension, with a panel for the first and for the last sample.

    Codecs without error, and errors that do not exist, are left out of the logarithmic scale.
    """
    names = list(rows[0].errors)
    panels = list(dict.fromkeys((names[0], names[-1])))
    families = list(dict.fromkeys(row.family for row in rows))
    with styled_pyplot() as pyplot:
        colours = pyplot.get_cmap("tab20").colors
        figure, all_axes = pyplot.subplots(
            1, len(panels), figsize=(2 + 5.2 * len(panels), 6.4), layout="constrained", squeeze=False
        )
        for axes, name in zip(all_axes[0], panels, strict=True):
            _plot_panel(axes, rows, families, name, colours)
        figure.draw_without_rendering()  # fixes the positions of the points, which labels need
        for axes, name in zip(all_axes[0], panels, strict=True):
            _label_points(axes, rows, name)
        handles, labels = all_axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        save_figure(figure, path)
        pyplot.close(figure)


def _plot_panel(
    axes: Any, rows: Sequence[CodecRow], families: Sequence[str], name: str, colours: Sequence[Any]
) -> None:
    points = [(row, row.errors[name].relative_l2) for row in rows]
    shown = [(row, error) for row, error in points if error]
    front = _pareto_front(rows, name)
    axes.plot(*zip(*front, strict=True), color=GREY, linewidth=1, zorder=1, label="Pareto front")
    for number, family in enumerate(families):
        here = [(row.bits_per_element, error) for row, error in shown if row.family == family]
        if here:
            axes.scatter(
                *zip(*here, strict=True),
                label=family,
                color=colours[number % len(colours)],
                marker=MARKERS[number % len(MARKERS)],
                s=34,
                zorder=3,
            )
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=80)  # room for labels to the right of the points
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("bits per element, with overhead")
    axes.set_ylabel("|x - y| / |x|")
    axes.set_title(f"relative error on {name}")
    axes.grid(which="major")


def _pareto_front(rows: Sequence[CodecRow], name: str) -> list[tuple[float, float]]:
    points = [(row.bits_per_element, row.errors[name].relative_l2) for row in rows]
    return pareto_points([(bits, error) for bits, error in points if error])


def _label_points(axes: Any, rows: Sequence[CodecRow], name: str) -> None:
    """Label the codecs on the Pareto front; a label that would overlap another one is left out."""
    front = _pareto_front(rows, name)
    taken: list[tuple[float, float, float]] = []  # left, right and baseline of the labels, in points
    for row in sorted(rows, key=lambda row: len(row.spec)):
        place = (row.bits_per_element, row.errors[name].relative_l2)
        if place not in front:
            continue
        x, y = axes.transData.transform(place) * 72 / axes.figure.dpi
        left, right = x, x + 3.9 * len(row.spec)
        if all(right < a or b < left or abs(y - base) > 8 for a, b, base in taken):
            taken.append((left, right, y))
            axes.annotate(row.spec, place, xytext=(5, 4), textcoords="offset points", fontsize=7, color=INK)
