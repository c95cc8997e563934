"""Tables of ``dtcomm plan``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dtcomm.cli.plan.training import Training
from dtcomm.planner.sweep import Sweep, size_name

WIDTH = 146  # least columns; a narrower terminal wraps the lines


def show(plan: Sweep, trainings: Sequence[Training], console: Console | None = None) -> None:
    """Print the tables and the verdicts."""
    console = console or Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH, file=console.file)
    console.print(_head(plan), highlight=False, soft_wrap=True)
    console.print(_rows(plan))
    for training in trainings:
        console.print(_steps(training))
        for line in training.verdicts:
            console.print(f"[dim]{line}[/dim]", highlight=False)
    for line in plan.verdicts:
        console.print(line, highlight=False, soft_wrap=True)
    if plan.skipped:
        names = ", ".join(plan.skipped)
        console.print(f"not estimated because the schedule is too large: {names}", highlight=False)


def _head(plan: Sweep) -> str:
    system = plan.system
    inside, between = system.inside, system.between
    lines = [
        f"{plan.collective} of {str(plan.dtype).removeprefix('torch.')} on {system.ranks} ranks: "
        f"{system.hosts} host(s) of {system.per_host}, {system.name} ({system.device.name})",
        f"inside {inside.gbytes:.4g} GB/s a rank, {inside.latency_us:g} us"
        + (
            f"; between {system.nics} x {between.gbytes:.4g} GB/s a host, {between.latency_us:g} us"
            if system.hosts > 1
            else ""
        ),
    ]
    if plan.table.measured and not system.device.generation:
        lines.append(f"measured times: {plan.table.source}{_placed(plan)}")
    return "\n".join(lines)


def _placed(plan: Sweep) -> str:
    seen = {each.placement for each in plan.table.measured if each.hosts == 1}
    if not plan.placement or plan.placement in seen:
        return f"; the CPUs are {plan.placement} now" if plan.placement else ""
    return f"; the CPUs are {plan.placement} now, which was not measured: run `dtcomm tune` again to add these times"


def _rows(plan: Sweep) -> Table:
    table = Table()
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    table.add_column("algorithm", overflow="fold")  # long names are folded, not numbers
    for name in ("time us", "algbw", "busbw", "speed-up", "sent", "encoded"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("runs on; what takes the time")
    last = None
    for row in plan.rows:
        made = row.best
        if last not in (None, made.nbytes):
            table.add_section()
        faster = f"{row.speedup:.2f}x"
        table.add_row(
            size_name(made.nbytes) if last != made.nbytes else "",
            made.codec,
            made.algorithm,
            f"{made.seconds * 1e6:,.1f}",
            f"{made.algbw:.2f}",
            f"{made.busbw:.2f}",
            faster if made.codec == "none" else f"[{'green' if row.speedup > 1 else 'red'}]{faster}[/]",
            size_name(made.wire_bytes),
            f"{made.encodings}x" if made.encodings else "-",
            f"nccl {made.detail}" if made.engine == "nccl" else made.detail,
        )
        last = made.nbytes
    return table


def _steps(training: Training) -> Table:
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
