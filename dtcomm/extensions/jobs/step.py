"""Seconds of a training step of a layout: computing, the pipeline's bubble, and the communication that is exposed.

**Pipeline.** With p stages, m micro-batches, and f + b seconds of a micro-batch forward and backward on a stage, a rank
idles for (p - 1) (f + b) with GPipe and 1F1B, (p - 1) (f + b) / v with v chunks a rank (Narayanan et al. 2021), and
(p - 1) f if gradients of weights are computed last (ZB-H1 of Qi et al. 2023, arXiv:2401.10241).

**Communication.** Sums of tensor parallelism and messages of experts are on the critical path. Transfers between stages
delay the first and the last micro-batch, and others as far as they take longer than a chunk's computing. Blocks of
ring attention are hidden behind attention. Gradients are hidden behind the backward of the last micro-batch (DDP,
ZeRO 1), or of all (ZeRO 2, which reduces each of them); parameters that ZeRO gathers behind a forward; FSDP's gathers
and reductions as in `replay_sharded`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dtcomm.extensions.jobs import rank_costs
from dtcomm.extensions.jobs.layout import AXES, Job, Layout
from dtcomm.extensions.jobs.network import ExpertRoutes, ExpertTraffic, Network
from dtcomm.extensions.jobs.rank_costs import JobMemory, MicroBatch
from dtcomm.extensions.jobs.training_model import BUCKET_BYTES, TrainingStep, replay_sharded

MOST_BUCKETS = 128  # gradients of large models are sent in larger buckets, so that each fills the links
cached_replay = lru_cache(maxsize=4096)(replay_sharded)


@dataclass(frozen=True, kw_only=True)
class JobStep:
    """A predicted step.

    Args:
        job: The job.
        layout: How it is divided.
        seconds: The whole step: computing, the bubble, what is exposed, and the optimizer.
        compute: Seconds of computing of a rank, ``recompute`` among it.
        recompute: Seconds of what backward computes again.
        bubble: Seconds in which a rank of the pipeline idles.
        optimizer: Seconds of the optimizer.
        exposed: Seconds of exposed communication by axis.
        communication: Seconds of all communication by axis, with what is hidden.
        memory: The memory of the rank that needs most.
    """

    job: Job
    layout: Layout
    seconds: float
    compute: float
    recompute: float
    bubble: float
    optimizer: float
    exposed: dict[str, float]
    communication: dict[str, float]
    memory: JobMemory

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, without recomputation and without the masked half of attention."""
        return self.tflops * 1e12 / self.job.peak_flops

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of one device."""
        job = self.job
        flops = job.tokens * job.model.flops_per_token(job.seq) * (2 + job.trained) / 3
        return flops / self.seconds / job.system.ranks / 1e12

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, of all ranks."""
        return self.job.tokens / self.seconds

    @property
    def bubble_share(self) -> float:
        """The idle time of the pipeline, as a share of its computing and idling."""
        return self.bubble / (self.bubble + self.compute) if self.bubble else 0.0

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the step without bubble and exposed communication, by the step."""
        return (self.compute + self.optimizer) / self.seconds

    @property
    def exposed_total(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.exposed.values())

    def fits(self) -> bool:
        """Return whether the memory of a device suffices; True if it is not known."""
        capacity = self.job.system.device.memory_bytes
        return not capacity or self.memory.total <= rank_costs.USABLE * capacity

    def as_dict(self) -> dict[str, Any]:
        """Return the step for JSON, times in milliseconds."""
        parts = ("compute", "recompute", "bubble", "optimizer")
        return {
            "layout": self.layout.as_dict(), "step_ms": round(self.seconds * 1e3, 3),
            **{f"{part}_ms": round(getattr(self, part) * 1e3, 3) for part in parts},
            "bubble": round(self.bubble_share, 4),
            "exposed_ms": {axis: round(self.exposed[axis] * 1e3, 3) for axis in AXES},
            "communication_ms": {axis: round(self.communication[axis] * 1e3, 3) for axis in AXES},
            "mfu": round(self.mfu, 4), "tflops": round(self.tflops, 1),
            "tokens_per_second": round(self.tokens_per_second), "scaling_efficiency": round(self.efficiency, 4),
            "memory": self.memory.as_dict(), "fits": self.fits(),
        }  # fmt: skip


class _Costs:
    """The communication of one layout; each method returns (all, exposed) seconds of a step."""

    def __init__(self, job: Job, layout: Layout, network: Network, batch: MicroBatch) -> None:
        self.job, self.layout, self.network, self.batch = job, layout, network, batch
        self.micro_batches = layout.micro_batches(job)
        self.tokens = layout.micro_batch * job.seq / layout.cp
        self.activation = self.tokens * job.model.hidden * job.dtype.itemsize
        self.layers = -(-job.model.layers // layout.pp)

    def tensor(self) -> float:
        """Return the seconds of tensor parallelism's sums in one micro-batch."""
        layout = self.layout
        one = self.network.collective("all_reduce", layout.tp, 1, self.activation, layout.codec("tp"))
        return one * self.layers * (6 if layout.recompute == "full" else 4)

    def experts(self) -> float:
        """Return the seconds of dispatching and combining in one micro-batch."""
        layout, model = self.layout, self.job.model
        if layout.ep == 1:
            return 0.0
        group = self.network.group(layout.ep, layout.tp)
        tokens = self.tokens / (layout.tp if self.job.sequence_parallel else 1)
        routes = ExpertRoutes(
            tokens=tokens, experts=model.experts, top_k=model.top_k, hosts=group.hosts, per_host=group.per_host,
        )  # fmt: skip
        codec, dtype = layout.codec("ep"), self.job.dtype
        traffic = ExpertTraffic(routes=routes, features=model.hidden, codec=codec, dtype=dtype)
        forward, backward = traffic.seconds(self.network, layout.tp)
        layers = self.layers * model.moe_layers / model.layers
        return layers * ((2 if layout.recompute == "full" else 1) * forward + backward)

    def context(self) -> tuple[float, float]:
        """Return the seconds of ring attention's transfers in one micro-batch, all and exposed."""
        layout, job = self.layout, self.job
        if layout.cp == 1:
            return 0.0, 0.0
        nbytes = self.tokens * job.model.kv_width * job.dtype.itemsize / layout.tp
        codec = layout.codec("cp")
        block = self.network.transfer(layout.tp, nbytes, codec)
        back = 2 * block  # keys and values again, and their gradients
        flops = self.tokens * job.model.attention_flops(job.seq) / layout.tp
        attention = flops / rank_costs.attention_speed(job) / layout.cp
        steps = (layout.cp - 1) * self.layers
        again = 1 if layout.recompute == "full" else 0
        everything = steps * (block * (1 + again) + back)
        exposed = (1 + again) * max(0.0, block - attention) + max(
            0.0, back - rank_costs.FLASH_BACKWARD * attention
        )
        return everything, steps * exposed

    def pipeline(self, forward: float) -> tuple[float, float]:
        """Return the seconds of a step's transfers between stages, all and exposed."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0, 0.0
        stride = layout.tp * layout.cp * layout.dp
        nbytes = self.activation / (layout.tp if self.job.sequence_parallel else 1)
        one = self.network.transfer(stride, nbytes, layout.codec("pp"))
        longer = max(0.0, one - forward / layout.chunks)
        ends = 2 * (layout.pp - 1) * one
        messages = 2 * self.micro_batches * layout.chunks
        return messages * one, ends + messages * longer

    def sums(self, name: str, spec: str, share: float = 1.0) -> tuple[float, float, float]:
        """Return the seconds to reduce or gather a share of the local parameters, of the last message, of one layer."""
        layout, network = self.layout, self.network
        local = rank_costs.local_parameters(self.job, layout)
        itemsize = self.job.dtype.itemsize
        total = last = 0.0
        dense = (local.dense, layout.replicas, layout.tp)
        experts = (local.experts, layout.replicas // layout.ep, layout.tp * layout.ep)
        for count, size, apart in (dense, experts):
            nbytes = count * itemsize * share
            if nbytes <= 0 or size == 1:
                continue
            bucket = max(float(BUCKET_BYTES), nbytes / MOST_BUCKETS)
            if layout.stage == "fsdp":
                bucket = nbytes / self.layers
            bucket = min(bucket, nbytes)
            one = network.collective(name, size, apart, bucket, spec)
            total += one * nbytes / bucket
            last += one
        return total, last, total / self.layers


def job_step(job: Job, layout: Layout, network: Network | None = None) -> JobStep:
    """Predict the step of a layout.

    Args:
        job: The job.
        layout: How it is divided. `Layout.problem` says whether that is possible.
        network: Estimates of collectives to share among layouts; None makes one.

    Returns:
        The step.

    Raises:
        ValueError: The layout is not possible for the job.

    Example:
        >>> from dtcomm.extensions.jobs.hardware import find_system
        >>> from dtcomm.extensions.jobs import Job, Layout, find_model, job_step
        >>> system = find_system("h100").resized(2, 8)
        >>> job = Job(model=find_model("llama3-8b"), system=system, batch=64, seq=8192)
        >>> 0.2 < job_step(job, Layout(dp=16, stage="fsdp", recompute="full")).mfu < 0.7
        True
    """
    if problem := layout.problem(job):
        raise ValueError(f"layout: {problem}")
    network = network or Network(job.system, job.dtype)
    batch = rank_costs.micro_batch_seconds(job, layout)
    costs = _Costs(job, layout, network, batch)
    m, p = costs.micro_batches, layout.pp
    tensor, experts = costs.tensor(), costs.experts()
    context, context_exposed = costs.context()
    # Forward sends as much as backward; what is sent again for recomputation belongs to backward.
    share = 1 / 3 if layout.recompute == "full" else 1 / 2
    inside = tensor + experts + context_exposed
    forward = batch.forward + inside * share
    backward = batch.backward + batch.recomputed + inside * (1 - share)
    pipeline, pipeline_exposed = costs.pipeline(forward)
    idle = {
        "gpipe": (p - 1) * (forward + backward),
        "1f1b": (p - 1) * (forward + backward),
        "interleaved": (p - 1) * (forward + backward) / layout.chunks,
        "zero-bubble": (p - 1) * forward,
    }[layout.schedule]
    exposed = dict.fromkeys(AXES, 0.0)
    communication = dict.fromkeys(AXES, 0.0)
    # What the micro-batches in the bubble send is part of the bubble.
    exposed.update(tp=m * tensor, ep=m * experts, cp=m * context_exposed, pp=pipeline_exposed)
    communication.update(tp=m * tensor, ep=m * experts, cp=m * context, pp=pipeline)
    _data_parallel(costs, forward, backward, exposed, communication)
    local = rank_costs.local_parameters(job, layout)
    updated = local.total
    if layout.stage != "ddp":
        updated = local.dense / layout.replicas + local.experts / max(1, layout.replicas // layout.ep)
    optimizer = rank_costs.optimizer_seconds(job, updated * job.trained)
    compute = m * batch.total
    return JobStep(
        job=job, layout=layout, seconds=compute + idle + sum(exposed.values()) + optimizer, compute=compute,
        recompute=m * batch.recomputed, bubble=idle, optimizer=optimizer, exposed=exposed,
        communication=communication, memory=rank_costs.job_memory(job, layout),
    )  # fmt: skip


def _data_parallel(
    costs: _Costs, forward: float, backward: float, exposed: dict[str, float], communication: dict[str, float]
) -> None:
    """Add the communication of gradients and of sharded parameters."""
    layout, m = costs.layout, costs.micro_batches
    if layout.replicas == 1:
        return
    gradients, parameters = layout.codec("dp"), layout.codec("params")
    if layout.stage == "ddp":
        total, last, _ = costs.sums("all_reduce", gradients, costs.job.trained)
        communication["dp"], exposed["dp"] = total, max(last, total - backward)
        return
    trained = costs.job.trained
    reduce, last, reduce_layer = costs.sums("reduce_scatter", gradients, trained)
    gather, first, gather_layer = costs.sums(
        "all_gather", parameters, 1.0 if layout.stage == "fsdp" else trained
    )
    if layout.stage != "fsdp":
        times = m if layout.stage == "zero-2" else 1
        communication["dp"], exposed["dp"] = times * reduce, max(last, times * (reduce - backward), 0.0)
        communication["params"], exposed["params"] = gather, max(first, gather - forward)
        return
    step: TrainingStep = cached_replay(
        costs.layers, forward / costs.layers, backward / costs.layers, gather_layer, reduce_layer
    )
    communication["dp"], communication["params"] = m * reduce, 2 * m * gather
    waiting = m * max(0.0, step.seconds - step.compute)
    of_gradients = reduce / (reduce + 2 * gather) if reduce + gather else 0.0
    exposed["dp"], exposed["params"] = waiting * of_gradients, waiting * (1 - of_gradients)
