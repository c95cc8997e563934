"""Output of ``dtcomm plan``: what all its reports share, and those of collectives and steps.

The plot of a collective shows bus bandwidth and speed-up against size, that of a training step its time.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dtcomm.cli import COLOURS, GREY, INK, new_table, styled_pyplot
from dtcomm.extensions.jobs.command.training import Training
from dtcomm.extensions.jobs.sweep import MIN_SPEEDUP, Sweep, SweepRow, size_name, time_name
from dtcomm.system import save_figure

WIDTH = 146  # least columns; a narrower terminal wraps the lines
MOST_SIZES = 8  # of a step's messages that are printed


class Output(Console):
    """The terminal, at least `WIDTH` columns wide."""

    def __init__(self) -> None:
        super().__init__(width=max(WIDTH, Console().width))

    def text(self, text: str, style: str | None = None) -> None:
        """Print a line as it is."""
        self.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def assumed(self, texts: Sequence[str]) -> None:
        """Print what is assumed and not measured."""
        if texts:
            self.text("assumed, not measured:", "dim")
        for text in texts:
            self.text(f"- {text}", "dim")


def print_plan(sweeps: Sequence[Sweep], training: Training | None) -> None:
    """Print the estimates of a collective, or those of a training step, its messages first, after the verdict."""
    out = Output()
    out.text(_header(sweeps[0], training))
    for text in sweeps[0].system.notes:
        out.text(text, "yellow")
    for text in sweeps[0].verdicts if training is None else [training.verdict]:
        out.text(f"verdict: {text}", "bold")
    if training is None:
        out.print(_collectives_table(sweeps[0].rows, {}))
    else:
        for messages in training.messages:
            largest = sorted(messages.counts, key=lambda size: size * messages.counts[size])[-MOST_SIZES:]
            shown: Counter[int] = Counter()
            for size in largest:
                shown[messages.fastest["none", size].nbytes] += messages.counts[size]
            rows = [row for row in messages.sweep.rows if row.best.nbytes in shown]
            out.print(_collectives_table(rows, shown, f"{messages.sweep.collective}: messages of a step"))
            if hidden := len(messages.counts) - len(largest):
                out.text(f"and {hidden} other sizes with fewer bytes (--json has all)")
        out.print(_training_table(training))
        for note in training.notes:
            out.text(note, "dim")
    if skipped := sorted({name for sweep in sweeps for name in sweep.skipped}):
        out.text(f"not estimated because the schedule is too large: {', '.join(skipped)}")
    out.assumed(sweeps[0].assumptions if training is None else training.assumptions)


def _header(sweep: Sweep, training: Training | None) -> str:
    system = sweep.system
    inside, between = system.inside, system.between
    dtype = str(sweep.dtype).removeprefix("torch.")
    across = f"; between {system.nics} x {between.gbytes:.4g} GB/s a host, {between.latency_us:g} us"
    lines = [
        f"{sweep.collective} of {dtype}" if training is None else training.title,
        f"on {system.ranks} ranks: {system.hosts} host(s) of {system.per_host}, {system.name} "
        f"({system.device.name})",
        f"inside {inside.gbytes:.4g} GB/s a rank, {inside.latency_us:g} us{across if system.hosts > 1 else ''}",
    ]
    if training is not None:
        lines.append(training.computing)
    if sweep.table.measured and not system.device.generation:
        lines.append(f"measured times: {sweep.table.source}")
    return "\n".join(lines)


def _collectives_table(
    rows: Sequence[SweepRow], counts: Mapping[int, int], title: str | None = None
) -> Table:
    """Return a table of estimates, with a column of how often each size is sent if ``counts`` has that."""
    columns = [">size", *([">times"] if counts else []), "codec", "~algorithm"]  # numbers are not folded
    columns += [">time", ">algbw GB/s", ">busbw GB/s", ">speed-up", ">sent", ">encoded"]
    leaving = any(row.best.leaving_bytes for row in rows)
    columns[-1:-1] = [">leaves a host"] if leaving else []
    table = new_table(columns, title)
    table.add_column("runs on; what takes the time")
    last = None
    for row in rows:
        estimate = row.best
        if last not in (None, estimate.nbytes):
            table.add_section()
        again = last == estimate.nbytes
        faster = f"{row.speedup:.2f}x"
        table.add_row(
            "" if again else size_name(estimate.nbytes),
            *([] if not counts else ["" if again else f"{counts[estimate.nbytes]:,}"]), estimate.codec,
            estimate.algorithm, time_name(estimate.seconds), f"{estimate.algbw:.2f}", f"{estimate.busbw:.2f}",
            faster if estimate.codec == "none" else f"[{'green' if row.speedup > 1 else 'red'}]{faster}[/]",
            size_name(estimate.wire_bytes), *([size_name(estimate.leaving_bytes)] if leaving else []),
            f"{estimate.encodings}x" if estimate.encodings else "-",
            f"nccl {estimate.detail}" if estimate.engine == "nccl" else estimate.detail,
        )  # fmt: skip
        last = estimate.nbytes
    return table


def _training_table(training: Training) -> Table:
    sharded = training.strategy == "FSDP"
    columns = ["gradients", "parameters"] if sharded else ["codec"]
    columns += [">step", ">communication", ">hidden", ">scaling"]
    columns += [">MFU"] if training.flops is not None else []
    columns += [">speed-up", ">residuals", ">buffers"]
    table = new_table(columns)
    for row in training.rows:
        cells = [f"{'* ' if row is training.best else ''}{row.codec}", *([row.parameters] if sharded else [])]
        cells += [time_name(row.step.seconds), time_name(row.step.communication)]
        cells += [f"{row.step.hidden:.0%}", f"{row.step.efficiency:.1%}"]
        cells += [] if row.mfu is None else [f"{row.mfu:.1%}"]
        cells += [
            f"{row.speedup:.2f}x",
            size_name(row.residual_bytes) if row.residual_bytes else "-",
            size_name(row.buffer_bytes) if row.buffer_bytes else "-",
        ]
        table.add_row(*cells, style="bold" if row is training.best else None)
    return table


def plot(sweeps: Sequence[Sweep], training: Training | None, path: str) -> None:
    """Write the plot of a collective or of a training step, in the format of the path's extension."""
    panels = 2 if training is None else 1
    with styled_pyplot() as pyplot:
        figure, axes = pyplot.subplots(
            1, panels, figsize=(1 + 5 * panels, 4.8), layout="constrained", squeeze=False
        )
        if training is None:
            lines = _plot_lines(sweeps[0])
            name = "bus bandwidth, GB/s of uncompressed bytes"
            _plot_sizes(axes[0][0], lines, lambda row: row.best.busbw, name, "predicted bus bandwidth")
            axes[0][0].set_yscale("log")
            axes[0][0].legend(frameon=False, fontsize=8.5)
            _plot_speedups(axes[0][1], sweeps[0], lines)
        else:
            _plot_steps(axes[0][0], training)
        system = sweeps[0].system
        what = sweeps[0].collective if training is None else f"{training.strategy} step"
        where = f"{system.ranks} ranks: {system.hosts} host(s) of {system.per_host}, {system.name}"
        figure.suptitle(f"{what} on {where}", x=0.01, ha="left", fontsize=12)
        save_figure(figure, path)
        pyplot.close(figure)


def _plot_lines(sweep: Sweep) -> dict[str, list[SweepRow]]:
    # One line for each codec, or for each codec and algorithm if several algorithms were requested.
    several = len({(row.best.nbytes, row.best.codec) for row in sweep.rows}) < len(sweep.rows)
    lines: dict[str, list[SweepRow]] = {}
    for row in sweep.rows:
        name = f"{row.best.codec}, {row.best.algorithm}" if several else row.best.codec
        lines.setdefault(name, []).append(row)
    return lines


def _plot_sizes(
    axes: Any, lines: dict[str, list[SweepRow]], value: Callable[[SweepRow], float], name: str, title: str
) -> None:
    """Plot a value of each line against the size."""
    for index, (label, rows) in enumerate(lines.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "marker": "os^Dv*P"[index % 7]}
        points = [row.best.nbytes for row in rows], [value(row) for row in rows]
        axes.plot(*points, label=label, markersize=4, linewidth=1.8, **style)
    axes.set_ylabel(name)
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: size_name(int(value)) if value >= 1 else "")
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("size of the tensor")
    axes.grid(which="major")


def _plot_speedups(axes: Any, sweep: Sweep, lines: dict[str, list[SweepRow]]) -> None:
    # The lines without a codec are left out, and the others keep their colours.
    shown = {name: rows if rows[0].best.codec != "none" else [] for name, rows in lines.items()}
    title = "speed-up (grey: within the estimates' error)"
    _plot_sizes(axes, shown, lambda row: row.speedup, "speed-up over the fastest without a codec", title)
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


def _plot_steps(axes: Any, training: Training) -> None:
    mark = {id(training.best): "* "}
    names = [mark.get(id(row), "") + row.label.replace(" with ", "\nwith ") for row in training.rows]
    compute = [row.step.compute * 1e3 for row in training.rows]
    exposed = [(row.step.seconds - row.step.compute) * 1e3 for row in training.rows]
    axes.bar(names, compute, color=COLOURS[0], label="compute")
    axes.bar(names, exposed, bottom=compute, color=COLOURS[3], label="waiting for the network")
    for at, row in enumerate(training.rows):
        share = f"{row.step.efficiency:.0%}"
        axes.text(at, row.step.seconds * 1e3, share, ha="center", va="bottom", fontsize=8.5)
    axes.set_ylim(top=1.25 * max(row.step.seconds for row in training.rows) * 1e3)
    axes.set_ylabel("ms per step")
    axes.set_title(textwrap.fill(f"scaling efficiency: {training.title}", 64), fontsize=8.5)
    axes.legend(frameon=False, fontsize=8.5)
