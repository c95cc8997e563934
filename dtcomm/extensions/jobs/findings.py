"""Names what is wrong with a layout, or what holds it back, with the figure that shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtcomm.extensions.jobs.layout import AXES
from dtcomm.extensions.jobs.network import Network
from dtcomm.extensions.jobs.rank_costs import HALF_TOKENS, USABLE, job_memory
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

    def add(share: float, name: str, text: str) -> None:
        found.append((share, name, text))

    dp, params, tp, pp, cp, ep = (step.exposed[axis] / step.seconds for axis in AXES)
    if layout.tp > 1 and (hosts := network.hosts(layout.tp, 1)) > 1:
        add(tp, "tensor parallelism across slow links", f"groups of tp={layout.tp} reach over {hosts} hosts, and their "
            f"sums take {tp:.0%} of the step: keep tp at {job.system.per_host} or below")  # fmt: skip
    elif tp > 3 * SHARE:
        add(tp, "tensor parallelism exposed", f"sums of tp={layout.tp} take {tp:.0%} of the step: a smaller tp, or "
            "products that overlap with them, would shorten it")  # fmt: skip
    hidden = 1 - step.exposed["dp"] / step.communication["dp"] if step.communication["dp"] else 1.0
    if dp > SHARE:
        add(dp, "data parallelism without overlap", f"gradients take {dp:.0%} of the step, only {hidden:.0%} of their "
            "communication is hidden: larger micro-batches or fewer replicas hide more")  # fmt: skip
    if params > SHARE:
        again = f", {2 * layout.micro_batches(job)} times a step" if layout.stage == "fsdp" else ""
        add(params, "gathers of parameters exposed", f"{layout.stage} gathers parameters{again}, for {params:.0%} of "
            "the step: larger micro-batches, or a lower stage if memory allows")  # fmt: skip
    batches = layout.micro_batches(job)
    if layout.pp > 1 and batches < FEW_MICRO_BATCHES * layout.pp and step.bubble / step.seconds > SHARE:
        add(step.bubble / step.seconds, "too few micro-batches for the pipeline", f"{batches} micro-batches for "
            f"{layout.pp} stages leave a bubble of {step.bubble_share:.0%}: use a larger batch, fewer stages, or "
            "interleaving")  # fmt: skip
    if pp > SHARE:
        add(pp, "pipeline transfers exposed", f"transfers between stages take {pp:.0%} of the step")
    if cp > SHARE:
        add(cp, "context parallelism exposed", "keys and values take longer than attention on a block, "
            f"{cp:.0%} of the step: a smaller cp or longer sequences")  # fmt: skip
    if layout.ep > 1 and (hosts := network.hosts(layout.ep, layout.tp)) > 1 and ep > SHARE:
        add(ep, "experts across slow links", f"tokens cross {hosts} hosts for {ep:.0%} of the step: keep ep inside "
            "hosts, or compress what is dispatched")  # fmt: skip
    tokens = layout.micro_batch * job.seq / layout.cp
    speed = tokens / (tokens + HALF_TOKENS)
    if 1 - speed > 2 * SHARE:
        add(1 - speed, "micro-batches too small",
            f"{tokens:,.0f} tokens of a micro-batch leave matrix products at {speed:.0%} of their speed")  # fmt: skip
    if layout.recompute == "full":
        without = replace(layout, recompute="none")
        if job_memory(job, without).total <= USABLE * job.system.device.memory_bytes:
            faster = job_step(job, without, network).seconds
            add(1 - faster / step.seconds, "recomputation without need",
                f"activations fit without it, and the step would be {step.seconds / faster:.2f}x as fast")  # fmt: skip
    if layout.schedule == "gpipe" and layout.pp > 1 and batches > layout.pp:
        add(0.0, "GPipe keeps all activations", f"1F1B has the same bubble and keeps {layout.pp} micro-batches of "
            f"activations instead of {batches}")  # fmt: skip
    found.sort(key=lambda item: -item[0])
    return [Finding(name=name, text=text) for _, name, text in found]
