"""Seconds of computing: matrix products, attention, and passes over memory.

Constants of four kinds are fitted to published runs; everything else follows from shapes and data sheets:

- `MATMUL_REACH`: the share of the peak FLOP/s that large matrix products reach, by GPU generation. Hopper's is lower
  because power limits its clocks.
- `ATTENTION_REACH`: the share of that for fused attention, that of FlashAttention 2 in Triton. Newer kernels for Hopper
  are faster, so that long sequences take less time there than predicted.
- `PASSES`: how often each byte of a layer's activations is moved by the kernels between the matrix products.
- `HALF_TOKENS`: the tokens of a micro-batch at which a layer's products reach half their speed.

Those of Volta and Blackwell are not fitted: Volta's are assumed, Blackwell's are Hopper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtcomm.extensions.jobs.layout import Job, Layout

MATMUL_REACH = {"volta": 0.7, "ampere": 0.771, "hopper": 0.605, "blackwell": 0.605}
ATTENTION_REACH = {"volta": 0.4, "ampere": 0.405, "hopper": 0.31, "blackwell": 0.31}
PASSES = 2.29
HALF_TOKENS = 370.0
FLASH_BACKWARD = 2.5  # FLOPs of fused attention's backward by those of its forward: scores are computed again
OPTIMIZER_BYTES = (
    30  # read and written for a parameter by Adam: gradient, weight and two states in fp32, bf16 copy
)


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
    """Return the seconds of one micro-batch on the ranks of one replica, divided by its stages.

    Args:
        job: The job.
        layout: How it is divided; pipeline stages are taken to be as equal as whole layers allow.
    """
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
    backward = layers * (2 * products + again * attention + 2 * passes + 2 * unfused) + 2 * output / layout.pp
    recomputed = {
        "none": 0.0,
        "selective": layers * (unfused + (0.0 if job.flash else attention)),
        "full": layers * (products + attention + passes + unfused),
    }[layout.recompute]
    return MicroBatch(forward=forward, backward=backward, recomputed=recomputed)


def optimizer_seconds(job: Job, parameters: float) -> float:
    """Return the seconds of the optimizer for so many parameters of a rank."""
    return parameters * OPTIMIZER_BYTES / (job.system.device.memory_gbytes * 1e9 * job.system.device.reach)
