"""Metrics for dashboards: the text format of Prometheus, and values for loggers such as TensorBoard.

The format is https://prometheus.io/docs/instrumenting/exposition_formats; node_exporter's textfile collector reads a
folder of such files.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dtcomm.profiling.summary import Summary
from dtcomm.system import write_file


@dataclass(frozen=True)
class Metric:
    """One value; metrics of one name differ in their labels. A "counter" only grows, a "gauge" need not.

    ``detail`` marks those of which a model has too many for the lines of a log, such as one of each message.
    """

    name: str
    value: float
    help: str
    kind: str = "gauge"
    labels: Mapping[str, str] = field(default_factory=dict)
    detail: bool = False


class HasMetrics(Protocol):
    """What has metrics: `dtcomm.ddp.DDPState`, `dtcomm.fsdp.FSDPState`, `Timeline`."""

    def metrics(self) -> list[Metric]: ...


def summary_metrics(summary: Summary) -> list[Metric]:
    """Return the metrics of a timeline's summary, in seconds and shares."""
    gauges = {
        "step_seconds": (summary.step_ms * 1e-3, "median time of a step"),
        "communication_seconds": (summary.communication_ms * 1e-3, "time of a step with messages in flight"),
        "exposed_seconds": (summary.exposed_ms * 1e-3, "time of a step spent waiting for communication"),
        "communication_share": (summary.share, "exposed communication over the step"),
        "scaling_efficiency": (
            summary.efficiency,
            "step without waiting and starting messages, over the step",
        ),
    }
    return [Metric(f"dtcomm_{name}", value, text) for name, (value, text) in gauges.items()]


def prometheus(state: HasMetrics, labels: Mapping[str, str] | None = None) -> str:
    """Return the metrics in the text format of Prometheus.

    Args:
        state: What has metrics.
        labels: Labels that are added to every sample, such as the rank or the job.

    Returns:
        The exposition text.
    """
    metrics = state.metrics()
    lines: list[str] = []
    for name in dict.fromkeys(metric.name for metric in metrics):
        family = [metric for metric in metrics if metric.name == name]
        lines += [f"# HELP {name} {_escaped(family[0].help)}", f"# TYPE {name} {family[0].kind}"]
        lines += [
            f"{name}{_labels({**(labels or {}), **metric.labels})} {_number(metric.value)}"
            for metric in family
        ]
    return "\n".join(lines) + "\n"


def write_prometheus(
    state: HasMetrics, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None
) -> None:
    """Write the metrics to a file for node_exporter's textfile collector; the file is replaced atomically.

    Args:
        state: What has metrics.
        path: The file, one for each rank; its name must end in ``.prom``.
        labels: Labels that are added to every sample.

    Raises:
        ValueError: The collector would ignore a file of this name.
    """
    target = Path(path)
    if target.suffix != ".prom":
        raise ValueError(f"path: {target.name}: the textfile collector reads files that end in .prom only")
    write_file(target, prometheus(state, labels))


def log_metrics(source: HasMetrics, logger: Any, step: int | None = None) -> None:
    """Give the finite metrics to a logger, by their names and labels behind ``dtcomm/``.

    That is about a dozen values; those of single messages are left to `prometheus` and to the report. In the labels
    that make up a name, what loggers do not take in names becomes ``_``.

    Args:
        source: What has metrics.
        logger: An object with ``log_metrics(dict, step=)`` (MLflow, loggers of Lightning), ``add_scalar(name, value,
            step)`` (TensorBoard) or ``log(dict, step=)`` (Weights & Biases, Accelerate), or a function of a dict.
        step: The step that the logger gets; functions get none. Default None: what the logger itself counts.

    Raises:
        TypeError: ``logger`` is none of these.
    """
    values = scalars(source)
    given = {} if step is None else {"step": step}
    if hasattr(logger, "log_metrics"):
        logger.log_metrics(values, **given)
    elif hasattr(logger, "add_scalar"):
        for name, value in values.items():
            logger.add_scalar(name, value, step)
    elif hasattr(logger, "log") and not isinstance(logger, logging.Logger):
        logger.log(values, **given)
    elif callable(logger):
        logger(values)
    else:
        raise TypeError(
            f"logger: got {type(logger).__name__}; valid: an object with log(dict, step=) (wandb), add_scalar(name, "
            "value, step) (TensorBoard) or log_metrics(dict, step=) (MLflow, Lightning), or a function of a dict"
        )


def scalars(source: HasMetrics) -> dict[str, float]:
    """Return the finite metrics, without details, by the names that `log_metrics` gives them."""
    values = {}
    for metric in source.metrics():
        if math.isfinite(metric.value) and not metric.detail:  # TensorBoard cannot draw infinite ones
            labels = (re.sub(r"[^\w.-]+", "_", value) for value in metric.labels.values() if value)
            values["/".join(["dtcomm", metric.name.removeprefix("dtcomm_"), *labels])] = float(metric.value)
    return values


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
