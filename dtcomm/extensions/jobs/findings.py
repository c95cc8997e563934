"""Names what is wrong with a layout, or what holds it back, with the figure that shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtcomm.extensions.jobs.compute import HALF_TOKENS
from dtcomm.extensions.jobs.memory import USABLE, job_memory
from dtcomm.extensions.jobs.network import Network
from dtcomm.extensions.jobs.step import JobStep, job_step

SHARE = 0.05  # of a step, from which on exposed communication or idling is named
FEW_MICRO_BATCHES = 4  # for each stage; below, a pipeline without interleaving idles for a fifth of the time


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An anti-pattern.

    Args:
        name: Its name, in words that do not change.
        text: What it costs in this layout, with figures, and what to do.
    """

    name: str
    text: str


def findings(step: JobStep, network: Network | None = None) -> list[Finding]:
    """Return the anti-patterns of a layout.

    Args:
        step: A predicted step.
        network: Estimates of collectives to share; None makes one.

    Returns:
        The anti-patterns, those that cost most first.

    Example:
        >>> from dtcomm.extensions.jobs.hardware import find_system
        >>> from dtcomm.extensions.jobs import Job, Layout, find_model, findings, job_step
        >>> system = find_system("h100").resized(2, 8)
        >>> job = Job(model=find_model("llama3-8b"), system=system, batch=64, seq=8192)
        >>> findings(job_step(job, Layout(tp=16, stage="ddp")))[0].name
        'tensor parallelism across slow links'
    """
    job, layout = step.job, step.layout
    network = network or Network(job.system, job.dtype)
    found: list[tuple[float, str, str]] = []

    def exposed(axis: str) -> float:
        return step.exposed[axis] / step.seconds

    if layout.tp > 1 and network.hosts(layout.tp, 1) > 1:
        found.append(
            (
                exposed("tp"),
                "tensor parallelism across slow links",
                f"groups of tp={layout.tp} reach over {network.hosts(layout.tp, 1)} hosts, and their sums take "
                f"{exposed('tp'):.0%} of the step: keep tp at {job.system.per_host} or below",
            )
        )
    elif exposed("tp") > 3 * SHARE:
        found.append(
            (
                exposed("tp"),
                "tensor parallelism exposed",
                f"sums of tp={layout.tp} take {exposed('tp'):.0%} of the step: a smaller tp, or products that overlap "
                "with them, would shorten it",
            )
        )
    hidden = 1 - step.exposed["dp"] / step.communication["dp"] if step.communication["dp"] else 1.0
    if exposed("dp") > SHARE:
        found.append(
            (
                exposed("dp"),
                "data parallelism without overlap",
                f"gradients take {exposed('dp'):.0%} of the step, only {hidden:.0%} of their communication is hidden: "
                "larger micro-batches or fewer replicas hide more",
            )
        )
    if exposed("params") > SHARE:
        again = f", {2 * layout.micro_batches(job)} times a step" if layout.stage == "fsdp" else ""
        found.append(
            (
                exposed("params"),
                "gathers of parameters exposed",
                f"{layout.stage} gathers parameters{again}, for {exposed('params'):.0%} of the step: larger "
                "micro-batches, or a lower stage if memory allows",
            )
        )
    batches = layout.micro_batches(job)
    if layout.pp > 1 and batches < FEW_MICRO_BATCHES * layout.pp and step.bubble / step.seconds > SHARE:
        found.append(
            (
                step.bubble / step.seconds,
                "too few micro-batches for the pipeline",
                f"{batches} micro-batches for {layout.pp} stages leave a bubble of {step.bubble_share:.0%}: use a "
                "larger batch, fewer stages, or interleaving",
            )
        )
    if exposed("pp") > SHARE:
        found.append(
            (
                exposed("pp"),
                "pipeline transfers exposed",
                f"transfers between stages take {exposed('pp'):.0%} of the step",
            )
        )
    if exposed("cp") > SHARE:
        found.append(
            (
                exposed("cp"),
                "context parallelism exposed",
                f"keys and values take longer than attention on a block, {exposed('cp'):.0%} of the step: a smaller cp "
                "or longer sequences",
            )
        )
    if layout.ep > 1 and network.hosts(layout.ep, layout.tp) > 1 and exposed("ep") > SHARE:
        found.append(
            (
                exposed("ep"),
                "experts across slow links",
                f"tokens cross {network.hosts(layout.ep, layout.tp)} hosts for {exposed('ep'):.0%} of the step: keep "
                "ep inside hosts, or compress what is dispatched",
            )
        )
    tokens = layout.micro_batch * job.seq / layout.cp
    if HALF_TOKENS / (tokens + HALF_TOKENS) > 2 * SHARE:
        found.append(
            (
                HALF_TOKENS / (tokens + HALF_TOKENS),
                "micro-batches too small",
                f"{tokens:,.0f} tokens of a micro-batch leave matrix products at "
                f"{tokens / (tokens + HALF_TOKENS):.0%} of their speed",
            )
        )
    if layout.recompute == "full":
        without = job_memory(job, replace(layout, recompute="none"))
        if without.total <= USABLE * job.system.device.memory_bytes:
            faster = job_step(job, replace(layout, recompute="none"), network).seconds
            found.append(
                (
                    1 - faster / step.seconds,
                    "recomputation without need",
                    f"activations fit without it, and the step would be {step.seconds / faster:.2f}x as fast",
                )
            )
    if layout.schedule == "gpipe" and layout.pp > 1 and batches > layout.pp:
        found.append(
            (
                0.0,
                "GPipe keeps all activations",
                f"1F1B has the same bubble and keeps {layout.pp} micro-batches of activations instead of {batches}",
            )
        )
    found.sort(key=lambda item: -item[0])
    return [Finding(name=name, text=text) for _, name, text in found]
