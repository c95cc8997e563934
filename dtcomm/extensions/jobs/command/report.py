"""Output of ``dtcomm plan``: what all its reports share, and those of collectives and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from dtcomm.cli import new_table
from dtcomm.extensions.jobs.command.training import Training
from dtcomm.extensions.jobs.sweep import Sweep, SweepRow, size_name, time_name

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
