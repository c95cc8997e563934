"""Numbers for dashboards: Prometheus' text format, and scalars of a TensorBoard writer.

https://prometheus.io/docs/instrumenting/exposition_formats; the textfile collector of node_exporter reads a folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dtcomm.profiling.summary import Summary


@dataclass(frozen=True)
class Metric:
    """One value; ``kind`` is "counter" (only grows) or "gauge". Metrics of one name differ in their labels."""

    name: str
    value: float
    help: str
    kind: str = "gauge"
    labels: Mapping[str, str] = field(default_factory=dict)


class Measured(Protocol):
    """`dtcomm.ddp.State`, `dtcomm.fsdp.State`."""

    def metrics(self) -> list[Metric]: ...


class Writer(Protocol):
    """``torch.utils.tensorboard.SummaryWriter``, or what else takes its scalars."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...


def of_summary(summary: Summary) -> list[Metric]:
    """What a timeline says, in seconds and shares."""
    gauges = {
        "step_seconds": (summary.step_ms * 1e-3, "median time of a step"),
        "communication_seconds": (
            summary.communication_ms * 1e-3,
            "in which messages were under way, a step",
        ),
        "exposed_seconds": (summary.exposed_ms * 1e-3, "in which a step stood still for communication"),
        "communication_share": (summary.share, "exposed communication over the step"),
        "scaling_efficiency": (summary.efficiency, "the step without waiting and sending, over the step"),
    }
    return [Metric(f"dtcomm_{name}", value, text) for name, (value, text) in gauges.items()]


def prometheus(state: Measured, labels: Mapping[str, str] | None = None) -> str:
    """Prometheus' text format; ``labels`` (the rank, the job) go to every sample."""
    metrics = state.metrics()
    lines: list[str] = []
    for name in dict.fromkeys(metric.name for metric in metrics):
        family = [metric for metric in metrics if metric.name == name]
        lines += [f"# HELP {name} {_escaped(family[0].help)}", f"# TYPE {name} {family[0].kind}"]
        lines += [
            f"{name}{_labels({**(labels or {}), **each.labels})} {_number(each.value)}" for each in family
        ]
    return "\n".join(lines) + "\n"


def write_prometheus(
    state: Measured, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None
) -> None:
    """`prometheus` into a file of the textfile collector's folder, whole or not at all: who reads it sees the old one
    or the new one. Its name must end in ``.prom``, or nobody would read it; one file a rank.
    """
    target = Path(path)
    if target.suffix != ".prom":
        raise ValueError(f"path: {target.name}: the textfile collector reads files that end in .prom only")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(prometheus(state, labels), encoding="utf-8")
    draft.replace(target)


def write_tensorboard(state: Measured, writer: Writer, step: int, prefix: str = "dtcomm") -> None:
    """Every metric as a scalar: ``dtcomm/relative_error/int8``."""
    for metric in state.metrics():
        if not math.isfinite(metric.value):
            continue  # TensorBoard draws none
        tag = "/".join([metric.name.removeprefix("dtcomm_"), *_said(metric.labels)])
        writer.add_scalar(f"{prefix}/{tag}", metric.value, step)


def _said(labels: Mapping[str, str]) -> Iterable[str]:
    return (value for value in labels.values() if value)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels.items())
    return "{" + pairs + "}"


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
