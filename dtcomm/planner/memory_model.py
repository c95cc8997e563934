"""What a model costs a rank in memory under each stage of sharding (Rajbhandari et al. 2020, arXiv:1910.02054).

P parameters that are computed with in b bytes, on n ranks, and an optimiser that keeps s values for each; a "unit" is
what is gathered at once, a layer. FSDP's shards and those of stages 1 and 2 are stepped in fp32. To that comes what
compression keeps: residuals of the gradients as a rank has them before they are cut, and the parameters as peers know
them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.codecs import codec

BUCKET = 25 * 2**20
STAGES = ("ddp", "zero-1", "zero-2", "fsdp")
#: Bytes an element of what error feedback keeps; LoCo's moving average is in 8 bits and a scale a block.
RESIDUALS = {
    "none": 0.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": codec("int8").wire_bytes(2**20) / 2**20,
    "loco": codec("int8:block=256").wire_bytes(2**20) / 2**20,
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """``layers`` equal units; ``states``: values a parameter that the optimiser keeps, 2 for Adam."""

    params: float
    layers: int = 32
    itemsize: int = 4
    states: int = 2
    bucket_bytes: int = BUCKET


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on one rank. ``parameters``: what lasts of them; ``passing``: units while they are computed with, and their
    gradients until they are cut. ``references``: of ``delta:``.
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
        return (
            self.parameters
            + self.optimizer
            + self.gradients
            + self.passing
            + self.residuals
            + self.references
        )

    def as_dict(self) -> dict[str, Any]:
        """Bytes, rounded."""
        found = {
            name: round(each) if isinstance(each, float) else each for name, each in asdict(self).items()
        }
        return {**found, "total": round(self.total)}


def need(model: Model, ranks: int, stage: str, feedback: str = "none", delta: bool = False) -> Need:
    """What a rank of ``ranks`` holds. ValueError naming the argument.

    delta: parameters are sent as differences, which under FSDP takes a copy of all of them; the sharded optimiser has
    the model itself for that.
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
        # A bucket that fills while another is under way; a unit as it is gathered and as it is computed with, and the
        # next one, whose place its gradients take in backward.
        parts["passing"] = {"zero-1": 0.0, "zero-2": 2 * bucket, "fsdp": 4 * unit}[stage]
    return Need(
        stage=stage,
        feedback=feedback,
        delta=delta,
        residuals=RESIDUALS[feedback] * p,
        references=whole if delta and stage == "fsdp" else 0.0,
        **parts,
    )


def table(model: Model, ranks: int) -> list[Need]:
    """Every stage as it is, then with what compression may keep."""
    found = []
    for stage in STAGES:
        kept = RESIDUALS if stage != "ddp" else [form for form in RESIDUALS if form != "loco"]
        found += [need(model, ranks, stage, feedback) for feedback in kept]
        if stage == "fsdp":
            found += [need(model, ranks, stage, feedback, delta=True) for feedback in ("none", "loco")]
    return found
