"""Output of ``dtcomm plan``: tables, a plot, and the memory tables of ``--memory``.

The plot shows bus bandwidth against size, the speed-up of codecs, and training steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dtcomm.cli._plot import COLOURS, GREY, INK, styled_pyplot
from dtcomm.cli.plan.options import PlanOptions
from dtcomm.cli.plan.training import Training
from dtcomm.planner.sweep import MIN_SPEEDUP, Sweep, SweepRow, size_name
from dtcomm.planner.training_model import ModelSize, RankMemory, memory_table

WIDTH = 146  # least columns; a narrower terminal wraps the lines


def print_plan(sweep: Sweep, trainings: Sequence[Training], console: Console | None = None) -> None:
    """Print the tables and the verdicts."""
    console = console or Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH, file=console.file)
    console.print(_header(sweep), highlight=False, soft_wrap=True)
    console.print(_collectives_table(sweep))
    for training in trainings:
        console.print(_training_table(training))
        for line in training.verdicts:
            console.print(f"[dim]{line}[/dim]", highlight=False)
    for line in sweep.verdicts:
        console.print(line, highlight=False, soft_wrap=True)
    if sweep.skipped:
        names = ", ".join(sweep.skipped)
        console.print(f"not estimated because the schedule is too large: {names}", highlight=False)


def _header(sweep: Sweep) -> str:
    system = sweep.system
    inside, between = system.inside, system.between
    lines = [
        f"{sweep.collective} of {str(sweep.dtype).removeprefix('torch.')} on {system.ranks} ranks: "
        f"{system.hosts} host(s) of {system.per_host}, {system.name} ({system.device.name})",
        f"inside {inside.gbytes:.4g} GB/s a rank, {inside.latency_us:g} us"
        + (
            f"; between {system.nics} x {between.gbytes:.4g} GB/s a host, {between.latency_us:g} us"
            if system.hosts > 1
            else ""
        ),
    ]
    if sweep.table.measured and not system.device.generation:
        lines.append(f"measured times: {sweep.table.source}{_placement_note(sweep)}")
    return "\n".join(lines)


def _placement_note(sweep: Sweep) -> str:
    known = {measured.placement for measured in sweep.table.measured if measured.hosts == 1}
    if not sweep.placement or sweep.placement in known:
        return f"; the CPUs are {sweep.placement} now" if sweep.placement else ""
    return f"; the CPUs are {sweep.placement} now, which was not measured: run `dtcomm tune` again to add these times"


def _collectives_table(sweep: Sweep) -> Table:
    table = Table()
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    table.add_column("algorithm", overflow="fold")  # long names are folded, not numbers
    for name in ("time us", "algbw", "busbw", "speed-up", "sent", "encoded"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("runs on; what takes the time")
    last = None
    for row in sweep.rows:
        estimate = row.best
        if last not in (None, estimate.nbytes):
            table.add_section()
        faster = f"{row.speedup:.2f}x"
        table.add_row(
            size_name(estimate.nbytes) if last != estimate.nbytes else "",
            estimate.codec,
            estimate.algorithm,
            f"{estimate.seconds * 1e6:,.1f}",
            f"{estimate.algbw:.2f}",
            f"{estimate.busbw:.2f}",
            faster if estimate.codec == "none" else f"[{'green' if row.speedup > 1 else 'red'}]{faster}[/]",
            size_name(estimate.wire_bytes),
            f"{estimate.encodings}x" if estimate.encodings else "-",
            f"nccl {estimate.detail}" if estimate.engine == "nccl" else estimate.detail,
        )
        last = estimate.nbytes
    return table


def _training_table(training: Training) -> Table:
    table = Table(
        title=f"{training.title}: {size_name(training.gradient_bytes)} of gradients", title_justify="left"
    )
    table.add_column("codec", no_wrap=True)
    for name in ("step ms", "communication ms", "hidden", "scaling", "speed-up", "residuals", "buffers"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in training.rows:
        table.add_row(
            row.codec,
            f"{row.step.seconds * 1e3:,.2f}",
            f"{row.step.communication * 1e3:,.2f}",
            f"{row.step.hidden:.0%}",
            f"{row.step.efficiency:.1%}",
            f"{row.speedup:.2f}x",
            size_name(row.residual_bytes) if row.residual_bytes else "-",
            size_name(row.buffer_bytes) if row.buffer_bytes else "-",
        )
    return table


def plot(sweep: Sweep, trainings: Sequence[Training], path: Path) -> None:
    """Write the plot in the format of the path's extension."""
    panels = 2 + len(trainings)
    with styled_pyplot() as pyplot:
        figure, axes = pyplot.subplots(1, panels, figsize=(1 + 5 * panels, 4.8), layout="constrained")
        lines = _plot_lines(sweep)
        _plot_bandwidth(axes[0], lines)
        _plot_speedups(axes[1], sweep, lines)
        for panel, training in zip(axes[2:], trainings, strict=True):
            _plot_steps(panel, training)
        system = sweep.system
        figure.suptitle(
            f"{sweep.collective} on {system.ranks} ranks: {system.hosts} host(s) of {system.per_host}, {system.name}",
            x=0.01,
            ha="left",
            fontsize=12,
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _plot_lines(sweep: Sweep) -> dict[str, list[SweepRow]]:
    # One line for each codec, or for each codec and algorithm if several algorithms were requested.
    several = len({(row.best.nbytes, row.best.codec) for row in sweep.rows}) < len(sweep.rows)
    lines: dict[str, list[SweepRow]] = {}
    for row in sweep.rows:
        name = f"{row.best.codec}, {row.best.algorithm}" if several else row.best.codec
        lines.setdefault(name, []).append(row)
    return lines


def _line_style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": "os^Dv*P"[index % 7],
        "markersize": 4,
        "linewidth": 1.8,
    }


def _plot_bandwidth(axes: Any, lines: dict[str, list[SweepRow]]) -> None:
    for index, (name, rows) in enumerate(lines.items()):
        axes.plot(
            [row.best.nbytes for row in rows],
            [row.best.busbw for row in rows],
            label=name,
            **_line_style(index),
        )
    axes.set_yscale("log")
    axes.set_ylabel("bus bandwidth, GB/s of uncompressed bytes")
    axes.set_title("predicted bus bandwidth")
    axes.legend(frameon=False, fontsize=8.5)
    _size_axis(axes)


def _plot_speedups(axes: Any, sweep: Sweep, lines: dict[str, list[SweepRow]]) -> None:
    for index, (name, rows) in enumerate(lines.items()):
        if rows[0].best.codec != "none":
            axes.plot(
                [row.best.nbytes for row in rows],
                [row.speedup for row in rows],
                label=name,
                **_line_style(index),
            )
    axes.axhline(1, color=GREY, linewidth=1)
    axes.axhspan(1 / MIN_SPEEDUP, MIN_SPEEDUP, color="#ececf0", zorder=0)
    low, high = axes.get_xlim()
    for spec, size in sweep.break_even.items():
        if size is not None and low < size < high:
            axes.axvline(size, color=GREY, linewidth=0.8, linestyle=":")
            axes.text(
                size, axes.get_ylim()[1], f" {spec} from {size_name(size)}", fontsize=7.5, color=INK, va="top",
                rotation=90, ha="right",
            )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed-up over the fastest without a codec")
    axes.set_title("speed-up (grey: within the estimates' error)")
    _size_axis(axes)


def _size_axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: size_name(int(value)) if value >= 1 else "")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("size of the tensor")
    axes.grid(which="major")


def _plot_steps(axes: Any, training: Training) -> None:
    names = [row.codec for row in training.rows]
    compute = [row.step.compute * 1e3 for row in training.rows]
    exposed = [(row.step.seconds - row.step.compute) * 1e3 for row in training.rows]
    axes.bar(names, compute, color=COLOURS[0], label="compute")
    axes.bar(names, exposed, bottom=compute, color=COLOURS[3], label="waiting for the network")
    for index, row in enumerate(training.rows):
        axes.text(
            index,
            row.step.seconds * 1e3,
            f"{row.step.efficiency:.0%}",
            ha="center",
            va="bottom",
            fontsize=8.5,
        )
    axes.set_ylim(top=1.25 * max(row.step.seconds for row in training.rows) * 1e3)
    axes.set_ylabel("ms per step")
    axes.set_title(f"training step, scaling efficiency\n{training.title}", fontsize=9.5)
    axes.legend(frameon=False, fontsize=8.5)


MEMORY_COLUMNS = ("parameters", "optimizer", "gradients", "passing", "residuals", "references", "total")
MEMORY_NOTE = (
    "passing: gathered units during their computation, their gradients, and DDP's buckets. references: the peers' copy "
    "of the parameters, only with delta:. Activations and the engine's buffers are not included."
)


def estimate_memory(options: PlanOptions) -> int:
    """Print the table or write the JSON; return 0."""
    assert options.memory is not None
    ranks = options.system.ranks
    rows = memory_table(options.memory, ranks)
    if options.json is not None:
        text = json.dumps(memory_as_dict(options.memory, ranks, rows), indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return 0
        Path(options.json).write_text(text)
    print_memory(options.memory, ranks, rows)
    return 0


def memory_as_dict(model: ModelSize, ranks: int, rows: list[RankMemory]) -> dict[str, Any]:
    """Return JSON values: bytes on one rank, and bytes per parameter."""
    return {
        "version": 1,
        "params": model.params,
        "layers": model.layers,
        "itemsize": model.itemsize,
        "states": model.states,
        "ranks": ranks,
        "results": [{**row.as_dict(), "per_parameter": round(row.total / model.params, 4)} for row in rows],
    }


def print_memory(model: ModelSize, ranks: int, rows: list[RankMemory]) -> None:
    """Print the table."""
    console = Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH, file=console.file)
    console.print(
        f"{model.params:.3g} parameters of {model.itemsize} bytes in {model.layers} layers on {ranks} ranks, "
        f"{model.states} states each: GB (1e9) on a rank",
        highlight=False,
    )
    table = Table()
    for name in ("stage", "residuals kept", "parameters sent"):
        table.add_column(name, no_wrap=True)
    for name in (*MEMORY_COLUMNS, "bytes/parameter"):
        table.add_column(name, justify="right")
    last = ""
    for row in rows:
        if last and last != row.stage:
            table.add_section()
        table.add_row(
            row.stage if row.stage != last else "",
            row.feedback,
            "delta:" if row.delta else "whole" if row.stage != "ddp" else "-",
            *(_gigabytes(getattr(row, name)) for name in MEMORY_COLUMNS),
            f"{row.total / model.params:.2f}",
        )
        last = row.stage
    console.print(table)
    console.print(MEMORY_NOTE, style="dim", highlight=False)


def _gigabytes(size: float) -> str:
    return "-" if not size else f"{size / 1e9:.3g}"
