"""What is planned: a job, and a layout of it over the ranks of a system."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtcomm.extensions.jobs.hardware import System, not_one_of, require_least
from dtcomm.extensions.jobs.models import ModelShape

#: What is sharded over data-parallel ranks (Rajbhandari et al. 2020, arXiv:1910.02054).
STAGES = ("ddp", "zero-1", "zero-2", "fsdp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RECOMPUTE = ("none", "selective", "full")
#: Axes that a codec can serve: gradients of data parallelism, parameters that ZeRO gathers, activations of tensor
#: parallelism, activations and gradients between pipeline stages, keys and values, and tokens sent to experts.
AXES = ("dp", "params", "tp", "pp", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and on what.

    Args:
        model: The model's shape.
        system: The hardware.
        batch: Sequences in a step, over all ranks.
        seq: Tokens of a sequence.
        dtype: The dtype of parameters, activations and gradients on the wire.
        flash: Whether attention is computed block by block, without storing scores.
        sequence_parallel: Whether tensor parallelism divides norms and dropouts too (Korthikanti et al. 2022).
        states: The optimizer's fp32 values for each parameter, 2 for Adam.
        feedback: Codecs of gradients that have error feedback.
        trainable: Parameters that learn, such as those of LoRA; None: all.

    Raises:
        ValueError: A number is not valid.
    """

    model: ModelShape
    system: System
    batch: int
    seq: int
    dtype: torch.dtype = torch.bfloat16
    flash: bool = True
    sequence_parallel: bool = True
    states: int = 2
    feedback: tuple[str, ...] = ()
    trainable: float | None = None

    def __post_init__(self) -> None:
        require_least(self, batch=1, seq=1)
        if self.trainable is not None and not 0 < self.trainable <= self.model.parameters:
            raise ValueError(f"trainable: expected 1 to {self.model.parameters:,}, got {self.trainable:,.0f}")
        self.peak_flops  # noqa: B018  (raises if the device's peak is not known)

    @property
    def trained(self) -> float:
        """The share of the parameters that learn."""
        return 1.0 if self.trainable is None else self.trainable / self.model.parameters

    @property
    def compute_type(self) -> str:
        """The type of the matrix products, as `Device.peak_flops` names it."""
        if self.dtype is torch.float32:
            return "tf32" if any(name == "tf32" for name, _ in self.system.device.tflops) else "fp32"
        return str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float16", "fp16")

    @property
    def peak_flops(self) -> float:
        """The peak FLOP/s of one device."""
        return self.system.device.peak_flops(self.compute_type)

    @property
    def tokens(self) -> int:
        """Tokens in a step, over all ranks."""
        return self.batch * self.seq


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is divided. Ranks are numbered with tensor parallelism innermost, then context, data and pipeline.

    Args:
        dp: Data-parallel replicas.
        tp: Ranks of a tensor-parallel group.
        pp: Pipeline stages.
        cp: Ranks that share a sequence.
        ep: Ranks that share the experts; they are among those of ``dp`` and ``cp``.
        stage: What data parallelism shards, one of ``ddp``, ``zero-1``, ``zero-2``, ``fsdp``.
        schedule: The order of micro-batches, one of `SCHEDULES`.
        chunks: Stages that each rank of an interleaved pipeline has.
        micro_batch: Sequences of a micro-batch on one replica.
        recompute: What backward computes again: ``none``, ``selective`` (scores), ``full`` (layers).
        codecs: The codec of each of `AXES`; those that are missing have none.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    stage: str = "ddp"
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    codecs: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        require_least(self, dp=1, tp=1, pp=1, cp=1, ep=1, chunks=1, micro_batch=1)
        for name, valid in (("stage", STAGES), ("schedule", SCHEDULES), ("recompute", RECOMPUTE)):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}: {not_one_of(getattr(self, name), valid)}")
        for axis, _ in self.codecs:
            if axis not in AXES:
                raise ValueError(f"codecs: {not_one_of(axis, AXES)}")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks among which gradients of dense parameters are summed."""
        return self.dp * self.cp

    def codec(self, axis: str) -> str:
        """Return the codec of an axis."""
        return dict(self.codecs).get(axis, "none")

    def with_codec(self, axis: str, spec: str) -> Layout:
        """Return the layout with another codec on an axis."""
        others = {name: value for name, value in self.codecs if name != axis}
        if spec != "none":
            others[axis] = spec
        return replace(self, codecs=tuple(sorted(others.items())))

    def micro_batches(self, job: Job) -> int:
        """Return the micro-batches of a replica in a step."""
        return job.batch // (self.dp * self.micro_batch)

    def problem(self, job: Job) -> str | None:
        """Return why the layout does not fit the job's shape, or None."""
        model = job.model
        heads, kv_heads, unit = model.heads, model.kv_heads, self.dp * self.micro_batch
        divisions = (
            (self.ranks != job.system.ranks, f"dp x tp x pp x cp = {self.ranks} is not the {job.system.ranks} ranks"),
            (heads % self.tp != 0, f"tp={self.tp} does not divide {heads} heads"),
            (max(kv_heads, self.tp) % min(kv_heads, self.tp) != 0,
             f"tp={self.tp} and {kv_heads} key/value heads do not divide"),
            (self.pp * self.chunks > model.layers, f"pp={self.pp} needs more layers than {model.layers}"),
            (job.seq % self.cp != 0, f"cp={self.cp} does not divide sequences of {job.seq}"),
            (job.batch % unit != 0,
             f"dp={self.dp} and micro-batches of {self.micro_batch} do not divide a batch of {job.batch}"),
            (self.ep > 1 and not model.experts, f"ep={self.ep}: {model.name} has no experts"),
            (self.ep > 1 and (model.experts % self.ep != 0 or self.replicas % self.ep != 0),
             f"ep={self.ep} does not divide {model.experts} experts and dp x cp = {self.replicas}"),
            (self.chunks > 1 and self.schedule != "interleaved", f"chunks={self.chunks}: only for interleaved"),
        )  # fmt: skip
        if reason := next((text for wrong, text in divisions if wrong), None):
            return reason
        if self.pp > 1 and self.schedule == "interleaved" and self.micro_batches(job) % self.pp:
            return f"interleaved needs micro-batches ({self.micro_batches(job)}) that pp={self.pp} divides"
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return the layout for JSON."""
        names = ("dp", "tp", "pp", "cp", "ep", "stage", "schedule", "chunks", "micro_batch", "recompute")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "codecs": {axis: self.codec(axis) for axis in AXES}}

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in ("dp", "tp", "pp", "cp", "ep"))
        parts = [f"{name}={size}" for name, size in sizes if size > 1]
        parts.append(self.stage)
        if self.pp > 1:
            parts.append(self.schedule + (f" x{self.chunks}" if self.chunks > 1 else ""))
        parts.append(f"micro-batch {self.micro_batch}")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recomputation")
        parts += [f"{spec} on {axis}" for axis, spec in self.codecs]
        return ", ".join(parts)
