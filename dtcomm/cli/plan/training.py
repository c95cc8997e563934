"""Training steps for ``dtcomm plan``: estimated from the size of a model, or replayed from the record of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dtcomm.cli.plan.options import TrainingModel
from dtcomm.codecs import codec as parse
from dtcomm.planner import hardware
from dtcomm.planner.estimate import candidates
from dtcomm.planner.sweep import Sweep
from dtcomm.planner.training_model import Bucket, TrainingStep, even_buckets, parse_record, replay


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One codec: the step, its speed-up over ``none``, and the bytes of residuals and buffers on a rank."""

    codec: str
    step: TrainingStep
    speedup: float
    residual_bytes: int
    buffer_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "step_ms": round(self.step.seconds * 1e3, 4),
            "compute_ms": round(self.step.compute * 1e3, 4),
            "communication_ms": round(self.step.communication * 1e3, 4),
            "overlap": round(self.step.hidden, 4),
            "scaling_efficiency": round(self.step.efficiency, 4),
            "speedup": round(self.speedup, 4),
            "residual_bytes": self.residual_bytes,
            "buffer_bytes": self.buffer_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Training:
    """Estimates of a training step.

    ``kind`` is model or record; ``error`` is the relative error of the replay, if the record has the measured times.
    """

    kind: str
    title: str
    gradient_bytes: int
    rows: list[TrainingRow]
    error: float | None = None
    verdicts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "gradient_bytes": self.gradient_bytes,
            "rows": [row.as_dict() for row in self.rows],
            "replay_error": None if self.error is None else round(self.error, 5),
            "words": list(self.verdicts),
        }


def of_model(sweep: Sweep, model: TrainingModel, codecs: Sequence[str]) -> Training:
    """Estimate steps of a model whose gradients become ready evenly over the last two thirds of the step."""
    buckets, rest = even_buckets(model.params, model.dtype.itemsize, model.step_ms * 1e-3, model.bucket_bytes)
    kind = str(model.dtype).removeprefix("torch.")
    title = f"{model.params:.3g} parameters, {kind} gradients, {model.step_ms:g} ms of compute per step"
    rows = _rows(sweep, buckets, rest, codecs, model.dtype)
    return Training(
        kind="model", title=title, gradient_bytes=sum(bucket.nbytes for bucket in buckets), rows=rows
    )


def of_record(sweep: Sweep, path: Path, codecs: Sequence[str]) -> Training:
    """Replay the recorded buckets of a run on another system."""
    record = parse_record(hardware.read_json(path), str(path))
    verdicts = []
    error = record.error
    if error is None:
        verdicts.append(
            "the record has no comm_ms for every bucket, or no step_ms: the replay's error is not known"
        )
    else:
        verdicts.append(
            f"replayed with its own times the step takes {record.replayed().seconds * 1e3:.4g} ms; it took "
            f"{record.step * 1e3:.4g} ms: an error of {error:+.1%}"
        )
    if record.ranks and record.ranks != sweep.system.ranks:
        verdicts.append(f"recorded on {record.ranks} ranks, replayed on {sweep.system.ranks}")
    rows = _rows(sweep, list(record.buckets), record.rest, codecs, sweep.dtype)
    title = f"{path.name}: {len(record.buckets)} buckets, recorded with {record.codec}"
    total = sum(bucket.nbytes for bucket in record.buckets)
    return Training(
        kind="record", title=title, gradient_bytes=total, rows=rows, error=error, verdicts=tuple(verdicts)
    )


def _rows(
    sweep: Sweep, buckets: Sequence[Bucket], rest: float, codecs: Sequence[str], dtype: torch.dtype
) -> list[TrainingRow]:
    reduces = replace_collective(sweep, dtype)
    rows: list[TrainingRow] = []
    for spec in dict.fromkeys(("none", *codecs)):
        codec = parse(spec)
        names = candidates("all_reduce", codec, sweep.system)
        best = {
            size: min(reduces.estimates(names, codec, size), key=lambda estimate: estimate.seconds)
            for size in {bucket.nbytes for bucket in buckets}
        }
        step = replay(buckets, rest, lambda bucket, best=best: best[bucket.nbytes].seconds)  # type: ignore[misc]
        elements = sum(bucket.nbytes for bucket in buckets) // dtype.itemsize
        rows.append(
            TrainingRow(
                codec=spec,
                step=step,
                speedup=rows[0].step.seconds / step.seconds if rows else 1.0,
                residual_bytes=0 if codec.lossless(dtype) else 4 * elements,
                buffer_bytes=max(estimate.memory_bytes for estimate in best.values()),
            )
        )
    return rows


def replace_collective(sweep: Sweep, dtype: torch.dtype) -> Sweep:
    """Return the plan with the same system and table for an all_reduce of gradients."""
    return replace(sweep, collective="all_reduce", dtype=dtype, rows=[], skipped=[])
