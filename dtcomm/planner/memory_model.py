"""Predicts the memory of a rank in each stage of sharding (Rajbhandari et al. 2020, arXiv:1910.02054).

A model has P parameters of b bytes, on n ranks, and an optimizer that keeps s values for each. A *unit* is what is
gathered at once: a layer. FSDP and the stages 1 and 2 update their shards in fp32. Compression adds residuals of a
rank's whole gradients, and with ``delta:`` a copy of the parameters as the peers know them. ``dtcomm plan --memory``
calls this.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.codecs import codec

BUCKET = 25 * 2**20
STAGES = ("ddp", "zero-1", "zero-2", "fsdp")
#: Bytes per element of residuals, by their form; LoCo keeps a moving average in 8 bits with a scale per block.
RESIDUALS = {
    "none": 0.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": codec("int8").wire_bytes(2**20) / 2**20,
    "loco": codec("int8:block=256").wire_bytes(2**20) / 2**20,
}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model of ``layers`` equal units; ``states`` are the optimizer's values per parameter, 2 for Adam."""

    params: float
    layers: int = 32
    itemsize: int = 4
    states: int = 2
    bucket_bytes: int = BUCKET


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank.

    ``parameters`` are those kept between steps. ``passing`` are units while they are computed with and their gradients
    until they are reduced. ``references`` are the copies for ``delta:``.
    """

    stage: str
    feedback: str
    delta: bool
    parameters: float
    optimizer: float
    gradients: float
    passing: float
    residuals: float
    references: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return (
            self.parameters
            + self.optimizer
            + self.gradients
            + self.passing
            + self.residuals
            + self.references
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the bytes, rounded, for JSON."""
        fields = {
            name: round(value) if isinstance(value, float) else value for name, value in asdict(self).items()
        }
        return {**fields, "total": round(self.total)}


def rank_memory(
    model: ModelSize, ranks: int, stage: str, feedback: str = "none", delta: bool = False
) -> RankMemory:
    """Return the memory of one rank.

    Args:
        model: The model.
        ranks: The number of ranks.
        stage: One of `STAGES`.
        feedback: The form of the residuals, one of `RESIDUALS`.
        delta: Whether parameters are sent as differences. FSDP then keeps a copy of all of them; the sharded optimizer
            has the model itself for that.

    Raises:
        ValueError: If an argument is not valid.
    """
    if stage not in STAGES:
        raise ValueError(f"stage: {stage!r} is not one of {', '.join(STAGES)}")
    if feedback not in RESIDUALS:
        raise ValueError(f"feedback: {feedback!r} is not one of {', '.join(RESIDUALS)}")
    if ranks < 1:
        raise ValueError(f"ranks: must be at least 1, got {ranks}")
    p, b = model.params, model.itemsize
    whole, shard = p * b, 4 * p / ranks
    unit = whole / model.layers
    bucket = min(float(model.bucket_bytes), whole)
    if stage == "ddp":
        # Buckets are another copy of the gradients, unless gradient_as_bucket_view is set.
        parts = {"parameters": whole, "optimizer": model.states * whole, "gradients": whole, "passing": whole}
    else:
        parts = {"optimizer": model.states * shard, "gradients": shard, "parameters": shard}
        if stage != "fsdp":
            parts["parameters"] += whole
        if stage == "zero-1":
            parts["gradients"] += whole
        # zero-2: a bucket that fills while another one is sent. fsdp: a unit as it is gathered and as it is computed
        # with, and the next unit, whose place its gradients take in backward.
        parts["passing"] = {"zero-1": 0.0, "zero-2": 2 * bucket, "fsdp": 4 * unit}[stage]
    return RankMemory(
        stage=stage,
        feedback=feedback,
        delta=delta,
        residuals=RESIDUALS[feedback] * p,
        references=whole if delta and stage == "fsdp" else 0.0,
        **parts,
    )


def memory_table(model: ModelSize, ranks: int) -> list[RankMemory]:
    """Return every stage uncompressed, then with each form of compression state."""
    rows = []
    for stage in STAGES:
        forms = RESIDUALS if stage != "ddp" else [form for form in RESIDUALS if form != "loco"]
        rows += [rank_memory(model, ranks, stage, feedback) for feedback in forms]
        if stage == "fsdp":
            rows += [rank_memory(model, ranks, stage, feedback, delta=True) for feedback in ("none", "loco")]
    return rows
