"""Output of ``dtcomm codecs``: tables, JSON values, and a plot of error against bits per element."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dtcomm.cli._common import GREY, INK, styled_pyplot
from dtcomm.cli.codecs.measure import CodecRow
from dtcomm.kernels import available, current
from dtcomm.measure import device as device_info
from dtcomm.measure.memory_floor import REDUCED_PAYLOADS

VERSION = 1
SUM = f"reduce {REDUCED_PAYLOADS}"  # the reduction whose share of the memory floor the table shows


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
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("codec", overflow="fold")  # on a narrow terminal names are folded, not numbers
    heads = ["bits per\nelement", "block"]
    heads += [] if size is None else ["encode\nGB/s", "decode\nGB/s"]
    heads += ["of floor:\nencode", "\ndecode", f"\n{SUM}"] if size is not None and device else []
    heads += [f"error on\n{name}" for name in samples] + ["worst\nblock", "1 - cosine"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        error = row.errors[detailed]
        cells = [f"{row.bits_per_element:.3g}", str(row.block)]
        if row.speed is None and size is not None:
            cells += ["-"] * (5 if device else 2)
        if row.speed is not None:
            cells += [f"{row.speed.encode:.3g}", f"{row.speed.decode:.3g}"]
        if row.speed is not None and device:
            cells += [f"{row.speed.of_floor[verb]:.2f}" for verb in ("encode", "decode", SUM)]
        cells += [_number(row.errors[name].relative_l2) for name in samples]
        cells += [
            _number(error.worst_block),
            _number(None if error.cosine is None else max(0.0, 1 - error.cosine)),
        ]
        table.add_row(row.spec, *cells)
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
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("codec", overflow="fold")
    for head in ("elements", "bits per\nelement", "error", "worst\nblock", "1 - cosine"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in rows[0].tensors:
        for row in rows:
            error = row.tensors[name]
            table.add_row(
                name if row is rows[0] else "",
                row.spec,
                f"{error.numel:,}",
                f"{8 * error.wire_bytes / error.numel:.3g}",
                _number(error.relative_l2),
                _number(error.worst_block),
                _number(None if error.cosine is None else max(0.0, 1 - error.cosine)),
            )
    console.print(table)


def _number(value: float | None) -> str:
    """Return three significant digits, or a dash for a missing value."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-3 else f"{value:.3g}"


MARKERS = "osD^vP*X<>ph8d"


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
        figure.savefig(path, dpi=150)
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
