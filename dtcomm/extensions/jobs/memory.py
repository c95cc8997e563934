"""Memory of a rank in a whole job: the parts of `RankMemory`, activations and the buffers of communication.

Parameters and gradients follow `training_model`. Beside it, 16-bit parameters have an fp32 copy in the
optimizer, gradients are kept in fp32, and only a rank's part of the model counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.codecs import codec as parse
from dtcomm.extensions.jobs.compute import activation_bytes
from dtcomm.extensions.jobs.layout import Job, Layout
from dtcomm.extensions.jobs.training_model import BUCKET_BYTES, RESIDUAL_BYTES

#: The share of a device's memory that a plan may fill: the rest is for the allocator's gaps and for libraries.
USABLE = 0.94


@dataclass(frozen=True, kw_only=True)
class JobMemory:
    """Bytes on the rank that needs most.

    Args:
        parameters: Parameters kept between steps, in the job's dtype.
        gradients: Gradients, in fp32.
        optimizer: The optimizer's states, and the fp32 copy of 16-bit parameters.
        residuals: Residuals of error feedback.
        activations: Activations with the layout's recomputation.
        buffers: Messages in flight: buckets, gathered layers, and activations on their way.
        activations_kept: What activations would be without any recomputation.
        activations_full: What they would be with recomputation of whole layers.
    """

    parameters: float
    gradients: float
    optimizer: float
    residuals: float
    activations: float
    buffers: float
    activations_kept: float
    activations_full: float

    @property
    def total(self) -> float:
        """All parts together."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.residuals
            + self.activations
            + self.buffers
        )

    @property
    def largest(self) -> tuple[str, float]:
        """The name and the bytes of the largest part."""
        names = ("parameters", "gradients", "optimizer", "residuals", "activations", "buffers")
        return max(((name, getattr(self, name)) for name in names), key=lambda part: part[1])

    def as_dict(self) -> dict[str, Any]:
        """Return the bytes, rounded, for JSON."""
        return {**{name: round(value) for name, value in asdict(self).items()}, "total": round(self.total)}


@dataclass(frozen=True, kw_only=True)
class LocalParameters:
    """Parameters of one rank before data parallelism shards them: dense ones, and those of its experts."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.dense + self.experts


def local_parameters(job: Job, layout: Layout) -> LocalParameters:
    """Return the parameters of the rank that has most: that of the embedding, in a pipeline."""
    model = job.model
    split = layout.tp * layout.pp
    layers = model.dense_parameters - model.embedding_parameters
    share = -(-model.layers // layout.pp) / model.layers
    ends = model.embedding_parameters / (1 if layout.pp == 1 or model.tied else 2)
    return LocalParameters(
        dense=(layers * share + ends) / layout.tp,
        experts=model.expert_parameters / split / layout.ep,
    )


def in_flight(job: Job, layout: Layout) -> float:
    """Return how many micro-batches the first stage keeps activations of, in units of its own layers."""
    batches, p = layout.micro_batches(job), layout.pp
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(batches)
    if layout.schedule == "interleaved":
        return min(float(batches), p + (p - 1) / layout.chunks)
    return float(min(batches, p))


def feedback_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of residuals for a parameter, as the integrations choose by default."""
    spec = layout.codec("dp")
    if parse(spec).name == "none":
        return 0.0
    return RESIDUAL_BYTES["fp32" if layout.stage == "ddp" or spec in job.feedback else "none"]


def job_memory(job: Job, layout: Layout) -> JobMemory:
    """Return the memory of the rank that needs most.

    Args:
        job: The job.
        layout: How it is divided.

    Returns:
        The bytes of each part.
    """
    model, itemsize = job.model, job.dtype.itemsize
    local = local_parameters(job, layout)
    copies = 0 if itemsize == 4 else 1
    shards = {
        "dense": layout.replicas if layout.stage != "ddp" else 1,
        "experts": layout.replicas // layout.ep if layout.stage != "ddp" else 1,
    }
    sharded = local.dense / shards["dense"] + local.experts / shards["experts"]
    optimizer = 4 * (job.states + copies) * sharded
    gradients = 4 * (sharded if layout.stage in ("zero-2", "fsdp") else local.total)
    # FSDP keeps fp32 shards, which are the optimizer's copy, and gathers layers in the dtype.
    parameters = itemsize * (0.0 if layout.stage == "fsdp" and copies else local.total)
    if layout.stage == "fsdp" and not copies:
        parameters = itemsize * sharded

    between, scores = activation_bytes(job, layout)
    tokens = layout.micro_batch * job.seq / layout.cp
    sequence_share = layout.tp if job.sequence_parallel else 1
    inputs = itemsize * tokens * model.hidden / sequence_share
    stage_layers = -(-model.layers // layout.pp)
    kept_batches = in_flight(job, layout)
    logits = 6 * tokens * model.vocab / layout.tp / (1 if layout.pp == 1 else layout.pp)
    kept = kept_batches * stage_layers * (between + scores) + logits
    full = kept_batches * stage_layers * inputs + between + scores + logits
    selective = kept_batches * stage_layers * between + scores + logits
    activations = {"none": kept, "selective": selective, "full": full}[layout.recompute]

    unit = local.total / stage_layers * itemsize
    buffers = 0.0
    if layout.replicas > 1:
        bucket = 2 * min(float(BUCKET_BYTES), local.total * itemsize)
        buffers += 4 * unit if layout.stage == "fsdp" else bucket
    if layout.tp > 1:
        buffers += 2 * itemsize * tokens * model.hidden
    if layout.pp > 1:
        buffers += 4 * inputs
    if layout.ep > 1:
        buffers += 2 * itemsize * tokens * model.top_k * model.hidden / sequence_share
    if layout.cp > 1:
        buffers += 4 * itemsize * tokens * model.kv_width / layout.tp
    return JobMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        residuals=feedback_bytes(job, layout) * local.total if layout.replicas > 1 else 0.0,
        activations=activations,
        buffers=buffers,
        activations_kept=kept,
        activations_full=full,
    )
