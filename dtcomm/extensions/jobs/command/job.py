"""``dtcomm plan job`` and ``sites``: runs the search, and prints the winner, the candidates and what does not fit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from dtcomm.cli import new_table, write_json
from dtcomm.extensions.jobs import AXES, JobPlan, JobStep, SiteMethod, across_sites, search
from dtcomm.extensions.jobs.command.flags import count_name
from dtcomm.extensions.jobs.command.options import JobOptions, codec_specs, job_options
from dtcomm.extensions.jobs.command.report import Output
from dtcomm.extensions.jobs.rank_costs import PARTS
from dtcomm.extensions.jobs.search import family
from dtcomm.extensions.jobs.sweep import MIN_SPEEDUP, size_name, time_name

AXIS_NAMES = {"dp": "gradients (dp)", "params": "parameters (params)", "tp": "tensor (tp)"}
AXIS_NAMES |= {"pp": "pipeline (pp)", "cp": "context (cp)", "ep": "experts (ep)"}
WAN_CODECS = ("int8", "int4")  # without --codec
ASSUMPTIONS = (
    "matrix products and attention reach the shares of the peak that were fitted to published runs",
    "stages are as equal as whole layers allow, the output matrix is divided among them, experts are balanced",
    "context parallelism is ring attention; sums of tensor parallelism and tokens to experts overlap with nothing",
    "a token goes to a rank or another host once; the codec of ep is that of tokens, outputs and gradients are in bf16",
    "optimizer: Adam in fp32 with an fp32 copy of 16-bit parameters; gradients are kept in fp32",
    "6 % of a device's memory is left for the allocator and for libraries",
    "what a codec does to the training is not part of the estimate: see docs/guides/codecs.md",
)


def plan_job(arguments: argparse.Namespace) -> int:
    """Search, and print or write what was found; return 0, or 1 if nothing fits."""
    chosen = job_options(arguments)
    plan = search(chosen.job, chosen.codecs, chosen.fixed)
    methods: list[SiteMethod] = []
    if chosen.wide_area is not None and plan.winner is not None:
        methods = across_sites(plan.winner, chosen.wide_area, codec_specs(arguments, WAN_CODECS))
    if write_json(as_dict(plan, chosen, methods), arguments.json):
        print_job(plan, chosen, methods)
    return 0 if plan.winner is not None else 1


def verdict(plan: JobPlan) -> str:
    """Return why the winner wins, in one sentence."""
    step = plan.winner
    if step is None:
        need = min(plan.misfits, key=lambda misfit: misfit.memory.total, default=None)
        device = plan.job.system.device
        least = f"; the least is {size_name(round(need.memory.total))} with {need.layout}" if need else ""
        return f"no layout fits in {size_name(device.memory_bytes)} of {device.name}{least}: use more hosts"
    loss = {"recomputation": step.recompute, "the bubble": step.bubble, "the optimizer": step.optimizer}
    loss |= {f"exposed {AXIS_NAMES[axis]}": step.exposed[axis] for axis in AXES}
    ranked = sorted(((value / step.seconds, name) for name, value in loss.items()), reverse=True)
    costs = ", ".join(f"{share:.0%} {name}" for share, name in ranked if share >= 0.005)
    text = f"{family(step.layout)}: {step.layout}: {time_name(step.seconds)} a step, MFU {step.mfu:.1%}"
    text += f"; of the step: {costs}" if costs else "; nothing but computing takes 0.5% of the step"
    if step.layout.codecs:
        text += f"; codecs gain {plan.speedup:.2f}x over the best layout without them"
    elif plan.compressed and plan.speedup > 1:
        error = f"within the error of the estimate ({MIN_SPEEDUP:g}x)"
        text += f"; codecs would gain {plan.speedup:.2f}x, {error}"
    else:
        text += "; no codec makes it faster"
    return text


def _best_method(methods: Sequence[SiteMethod]) -> str:
    best, plain = methods[0], next(m for m in methods if m.method == "DDP" and m.codec == "none")
    return (
        f"{best.method} with {best.codec}: {time_name(best.seconds)} a step, "
        f"{size_name(round(best.bytes_per_step))} a step from each site; DDP without a codec takes "
        f"{time_name(plain.seconds)}, {plain.seconds / best.seconds:.1f} times as long"
    )


def as_dict(plan: JobPlan, options: JobOptions, methods: Sequence[SiteMethod]) -> dict[str, Any]:
    """Return JSON values; times in milliseconds, memory in bytes."""
    job, model = plan.job, plan.job.model
    wide, sites = options.wide_area, None
    if wide is not None:
        link = {"sites": wide.sites, "gbytes": wide.port.gbytes, "rtt_ms": wide.rtt_ms, "every": wide.every}
        best = _best_method(methods) if methods else None
        sites = {**link, "verdict": best, "methods": [method.as_dict() for method in methods]}
    return {
        "version": 1,
        "model": {
            **{name: getattr(model, name) for name in ("name", "parameters", "active_parameters")},
            "flops_per_token": model.flops_per_token(job.seq),
        },
        "system": job.system.as_dict(), "batch": job.batch, "seq": job.seq,
        "dtype": str(job.dtype).removeprefix("torch."), "fixed": options.fixed,
        "winner": None if plan.winner is None else plan.winner.as_dict(),
        "candidates": [{"family": family(step.layout), **step.as_dict()} for step in plan.rows],
        "codec_speedup": None if not plan.steps else round(plan.speedup, 4),
        "tried": {"possible": plan.tried[0], "fit": plan.tried[1]},
        "misfits": [misfit.as_dict() for misfit in plan.misfits],
        "verdict": verdict(plan), "assumptions": list(ASSUMPTIONS), "across_sites": sites,
    }  # fmt: skip


def print_job(plan: JobPlan, options: JobOptions, methods: Sequence[SiteMethod]) -> None:
    """Print the plan."""
    out = Output()
    line = out.text
    job, model, system = plan.job, plan.job.model, plan.job.system
    active = f" ({count_name(model.active_parameters)} active)" if model.experts else ""
    line(
        f"{model.name}: {count_name(model.parameters)} parameters{active}, "
        f"{model.layers} layers of width {model.hidden}"
    )
    line(
        f"{job.batch:,} sequences of {job.seq:,} tokens a step, {str(job.dtype).removeprefix('torch.')}, on "
        f"{system.ranks} x {system.device.name}: {system.hosts} host(s) of {system.per_host}, {system.name}"
    )
    if leaf := system.leaf_hosts:
        line(f"{leaf} hosts below a leaf switch, oversubscription {system.oversubscription:g} above")
    if job.trainable is not None:
        line(
            f"{count_name(job.trainable)} parameters learn: gradients, residuals and optimizer are those of them"
        )
    for note in system.notes:
        line(note, "yellow")
    if methods:
        line(f"verdict across sites: {_best_method(methods)}", "bold")
        line(f"inside a site: {verdict(plan)}")
    else:
        line(f"verdict: {verdict(plan)}", "bold")
    line(f"{plan.tried[0]:,} layouts are possible, {plan.tried[1]:,} fit in memory")
    if plan.winner is not None:
        out.print(_candidates_table(plan))
        out.print(_axes_table(plan.winner))
        out.print(_memory_table(plan.rows))
    for misfit in plan.misfits:
        total, (part, size) = size_name(round(misfit.memory.total)), misfit.memory.largest
        needs = f"{misfit.family} needs at least {total} ({misfit.layout}), {size_name(round(size))} of it for {part}"
        line(f"does not fit: {needs}", "yellow")
    if options.wide_area is not None and methods:
        out.print(_sites_table(methods, options))
    out.assumed(ASSUMPTIONS)


def _candidates_table(plan: JobPlan) -> Table:
    columns = "family ~layout >step >MFU >exposed >bubble >recompute >efficiency >tokens/s >memory".split()
    table = new_table(
        columns, "the best of each family, the winner (*) first; codecs that gain below 10 % are left out"
    )
    for step in plan.rows:
        lost = step.exposed_total / step.seconds, step.bubble_share, step.recompute / step.seconds
        shares = (f"{share:.1%}" for share in (step.mfu, *lost, step.efficiency))
        totals = f"{step.tokens_per_second:,.0f}", size_name(round(step.memory.total))
        cells = [_marked(plan, step), str(step.layout), time_name(step.seconds), *shares, *totals]
        table.add_row(*cells, style="bold" if step is plan.winner else None)
    return table


def _marked(plan: JobPlan, step: JobStep) -> str:
    return f"{'* ' if step is plan.winner else ''}{family(step.layout)}"


def _axes_table(step: JobStep) -> Table:
    columns = ("axis", "codec", ">communication", ">exposed", ">of the step")
    table = new_table(columns, "communication of the winner")
    for axis in AXES:
        if step.communication[axis]:
            times = time_name(step.communication[axis]), time_name(step.exposed[axis])
            share = f"{step.exposed[axis] / step.seconds:.1%}"
            table.add_row(AXIS_NAMES[axis], step.layout.codec(axis), *times, share)
    if not table.rows:
        table.add_row("none", "-", "-", "-", "-")
    return table


def _memory_table(steps: Sequence[JobStep]) -> Table:
    columns = ("~layout", *(f">{name}" for name in PARTS), ">total", ">kept", ">recomputed")
    table = new_table(columns, "memory of a rank, and its activations without and with recomputation")
    for step in steps:
        memory = step.memory
        sizes = [getattr(memory, name) for name in PARTS]
        sizes += [memory.total, memory.activations_kept, memory.activations_full]
        table.add_row(str(step.layout), *(size_name(round(size)) if size else "-" for size in sizes))
    return table


def _sites_table(methods: Sequence[SiteMethod], options: JobOptions) -> Table:
    wide = options.wide_area
    assert wide is not None
    table = new_table(
        ("method", "codec", ">step", ">exposed", ">sent a step", ">hidden from"),
        f"across {wide.sites} sites: {wide.port.gbytes * 8:.3g} Gbit/s each way, {wide.rtt_ms:g} ms, "
        f"H = {wide.every}",
    )
    for method in methods:
        peak = "-" if method.peak_gbit is None else f"{method.peak_gbit:.3g} Gbit/s"
        times = time_name(method.seconds), time_name(method.exposed)
        table.add_row(method.method, method.codec, *times, size_name(round(method.bytes_per_step)), peak)
    return table
