"""What a layout costs one rank: seconds of computing, and bytes of memory.

Constants of four kinds are fitted to published runs; everything else follows from shapes and data sheets:

- `MATMUL_REACH`: the share of the peak FLOP/s that large matrix products reach, by GPU generation. Hopper's is lower
  because power limits its clocks.
- `ATTENTION_REACH`: the share of that for fused attention, that of FlashAttention 2 in Triton. Newer kernels for Hopper
  are faster, so that long sequences take less time there than predicted.
- `PASSES`: how often each byte of a layer's activations is moved by the kernels between the matrix products.
- `HALF_TOKENS`: the tokens of a micro-batch at which a layer's products reach half their speed.

Those of Volta and Blackwell are not fitted: Volta's are assumed, Blackwell's are Hopper's.

In memory, 16-bit parameters have an fp32 copy in the optimizer, and gradients and residuals are kept in fp32.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.extensions.jobs.layout import Job, Layout
from dtcomm.extensions.jobs.training_model import BUCKET_BYTES

MATMUL_REACH = {"volta": 0.7, "ampere": 0.771, "hopper": 0.605, "blackwell": 0.605}
ATTENTION_REACH = {"volta": 0.4, "ampere": 0.405, "hopper": 0.31, "blackwell": 0.31}
PASSES = 2.29
HALF_TOKENS = 370.0
FLASH_BACKWARD = 2.5  # FLOPs of fused attention's backward by those of its forward: scores are computed again
#: Read and written for a parameter by Adam: gradient, weight and two states in fp32, bf16 copy.
OPTIMIZER_BYTES = 30
#: The share of a device's memory that a plan may fill: the rest is for the allocator's gaps and for libraries.
USABLE = 0.94
PARTS = ("parameters", "gradients", "optimizer", "residuals", "activations", "buffers")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Seconds of one micro-batch on one rank, in all layers and the output matrix together, without communication."""

    forward: float
    backward: float
    recomputed: float

    @property
    def total(self) -> float:
        """Forward, backward and what is computed again."""
        return self.forward + self.backward + self.recomputed


def attention_speed(job: Job) -> float:
    """Return the FLOP/s that fused attention reaches."""
    generation = job.system.device.generation
    return job.peak_flops * MATMUL_REACH.get(generation, 0.6) * ATTENTION_REACH.get(generation, 0.5)


def activation_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Return the bytes of a layer's activations for one micro-batch: those between products, and scores.

    Korthikanti et al. 2022 (arXiv:2205.05198) count 34 bytes for a token and unit of width in 16 bits, 10 of them not
    divided by tensor parallelism alone, and 5 for a score, head and pair of tokens. Gated layers keep a third wide
    tensor, and grouped heads fewer keys; both follow from the shape.
    """
    model, itemsize = job.model, job.dtype.itemsize
    tokens = layout.micro_batch * job.seq / layout.cp
    width = float(model.ffn)
    if model.experts:
        routed = (model.top_k + model.shared) * model.expert_ffn
        width = (model.dense_layers * model.ffn + model.moe_layers * routed) / model.layers
    whole = (4 * itemsize + 2) * model.hidden  # inputs of norms and of blocks, and two dropout masks
    kv = min(model.kv_heads, model.heads) * model.head_dim * 2
    divided: float = itemsize * (2 * model.heads * model.head_dim + kv + (3 if model.gated else 2) * width)
    tp = layout.tp
    per_token = whole / (tp if job.sequence_parallel else 1) + divided / tp
    scores = 0.0 if job.flash else (2 * itemsize + 1) * model.heads * job.seq * tokens / tp
    return tokens * per_token, scores


def micro_batch_seconds(job: Job, layout: Layout) -> MicroBatch:
    """Return the seconds of one micro-batch on the ranks of one replica, whose stages are as equal as layers allow."""
    model, device = job.model, job.system.device
    tokens = layout.micro_batch * job.seq / layout.cp
    peak = job.peak_flops * MATMUL_REACH.get(device.generation, 0.6)
    speed = peak * tokens / (tokens + HALF_TOKENS)
    memory = device.memory_gbytes * 1e9 * device.reach
    products = 2 * tokens * model.layer_matmul_parameters / layout.tp / speed
    attention = tokens * model.attention_flops(job.seq, job.flash) / layout.tp
    attention /= attention_speed(job) if job.flash else peak
    between, scores = activation_bytes(job, layout)
    passes = PASSES * between / memory
    unfused = PASSES * scores / memory
    output = 2 * tokens * model.vocab * model.hidden / layout.tp / speed
    output += PASSES * 6 * tokens * model.vocab / layout.tp / memory  # logits in 16 bits and in fp32
    layers = -(-model.layers // (layout.pp * layout.chunks)) * layout.chunks  # of the longest stage
    forward = layers * (products + attention + passes + unfused) + output / layout.pp
    again = FLASH_BACKWARD if job.flash else 2.0
    both = 1 + job.trained  # gradients of activations, and of the weights that learn
    backward = (
        layers * (both * products + again * attention + 2 * passes + 2 * unfused) + both * output / layout.pp
    )
    recomputed = {
        "none": 0.0,
        "selective": layers * (unfused + (0.0 if job.flash else attention)),
        "full": layers * (products + attention + passes + unfused),
    }[layout.recompute]
    return MicroBatch(forward=forward, backward=backward, recomputed=recomputed)


def optimizer_seconds(job: Job, parameters: float) -> float:
    """Return the seconds of the optimizer for so many parameters of a rank."""
    return parameters * OPTIMIZER_BYTES / (job.system.device.memory_gbytes * 1e9 * job.system.device.reach)


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
        return float(sum(getattr(self, name) for name in PARTS))

    @property
    def largest(self) -> tuple[str, float]:
        """The name and the bytes of the largest part."""
        return max(((name, getattr(self, name)) for name in PARTS), key=lambda part: part[1])

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
        dense=(layers * share + ends) / layout.tp, experts=model.expert_parameters / split / layout.ep
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
    optimizer = 4 * (job.states + copies) * sharded * job.trained
    gradients = 4 * (sharded if layout.stage in ("zero-2", "fsdp") else local.total) * job.trained
    # FSDP keeps fp32 shards of what learns, which are the optimizer's copy, and gathers layers in the dtype.
    parameters = itemsize * local.total
    if layout.stage == "fsdp":
        parameters = itemsize * sharded * (1 - job.trained * copies)

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
        bucket = 2 * min(float(BUCKET_BYTES), local.total * itemsize * job.trained)
        buffers += 4 * unit if layout.stage == "fsdp" else bucket
    if layout.tp > 1:
        buffers += 2 * itemsize * tokens * model.hidden
    if layout.pp > 1:
        buffers += 4 * inputs
    if layout.ep > 1:
        buffers += 2 * itemsize * tokens * model.top_k * model.hidden / sequence_share
    if layout.cp > 1:
        buffers += 4 * itemsize * tokens * model.kv_width / layout.tp
    # Residuals are kept as the integrations choose by default.
    has_residuals = layout.replicas > 1 and layout.codec("dp") in job.feedback
    return JobMemory(
        parameters=parameters, gradients=gradients, optimizer=optimizer, activations=activations, buffers=buffers,
        residuals=4 * local.total * job.trained if has_residuals else 0.0,
        activations_kept=kept, activations_full=full,
    )  # fmt: skip
