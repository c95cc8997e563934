"""Reports: what was compressed, with what, how much it saved and what it cost; what was not compressed, and why.

Parameters with the same codec, dtype and reason form one row. Bytes are those of the wire: the collective counts what
this rank sent, and the bytes of a message are divided among its parameters in proportion to their payloads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtcomm.compress.gradient_sketch import Fidelity
from dtcomm.profiling.metrics import Metric
from dtcomm.profiling.tables import format_bytes, format_table, rich_group, rich_table

MAX_BUCKETS_SHOWN = 16
_BY_POLICY = ("policy:", "no rule matches")  # how reasons of a policy begin
_HEAD = ("codec", "dtype", "params", "elements", "sent", "saved", "rel. error", "note")
_LEFT = {0, 1, len(_HEAD) - 1}
_BUCKET_HEAD = ("bucket", "codec", "params", "bytes", "sent", "ratio", "rel. error", "ms", "guard")
_BUCKET_LEFT = {0, 1, len(_BUCKET_HEAD) - 1}


def total_seconds(times: Iterable[float | None]) -> float | None:
    """Return the sum; None if a time is unknown, as those of operations on a CUDA stream are."""
    total = 0.0
    for seconds in times:
        if seconds is None:
            return None
        total += seconds
    return total


@dataclass
class ParameterTotals:
    """The totals of one parameter; ``error`` and ``signal`` are sums of squares over the sampled steps."""

    numel: int
    codec: str = ""
    dtype: str = ""
    reason: str = ""
    refused: bool = False
    lossless: bool = True
    wire_bytes: float = 0.0
    plain_bytes: float = 0.0
    error: float = 0.0
    signal: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One group of parameters; bytes are this rank's, over all steps.

    Attributes:
        codec: What they are compressed with.
        dtype: The dtype of their gradients.
        reason: Why they are not compressed.
        names: The parameters.
        numel: Their elements.
        wire_bytes: What this rank sent.
        plain_bytes: What the same schedule would have sent uncompressed.
        relative_error: |what the encodings lost| / |gradient| over the sampled steps; None before the first one.
        refused: Whether a scheme was asked for that does not apply to them.
    """

    codec: str
    dtype: str
    reason: str
    names: tuple[str, ...]
    numel: int
    wire_bytes: int
    plain_bytes: int
    relative_error: float | None
    refused: bool = False

    @property
    def saved_bytes(self) -> int:
        """The bytes that were saved."""
        return self.plain_bytes - self.wire_bytes


@dataclass(frozen=True, kw_only=True)
class BucketRow:
    """One bucket, since its parameters and codecs last changed.

    Attributes:
        index: DDP's index.
        codec: Its codecs.
        parameters: The number of parameters.
        nbytes: The size of its uncompressed gradients.
        messages: How often it was sent.
        wire_bytes: What this rank sent, all messages together.
        plain_bytes: What the same schedule would have sent uncompressed.
        seconds: The time of its collectives, start to finish, all messages together; None if unknown.
        relative_error: |what the encodings lost| / |gradient| over the sampled steps; None before the first one.
        events: The guard's events about its parameters, counted over the whole run.
    """

    index: int
    codec: str
    parameters: int
    nbytes: int
    messages: int
    wire_bytes: int
    plain_bytes: int
    seconds: float | None
    relative_error: float | None
    events: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Uncompressed bytes over sent bytes; None before the first message."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the tables; sizes and time are those of one message."""
        count = max(1, self.messages)
        return (
            str(self.index),
            self.codec,
            str(self.parameters),
            format_bytes(self.nbytes),
            format_bytes(self.wire_bytes / count),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
            _format_error(self.relative_error),
            "-" if self.seconds is None else f"{self.seconds / count * 1e3:.2f}",
            _format_counts(self.events),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of one rank. ``str()`` and rich's print give tables, `to_dict` plain values, `to_json` their text.

    Attributes:
        policy: The policy, or "auto".
        feedback: The kind of error feedback.
        steps: The number of steps.
        messages: The number of messages.
        wire_bytes: What this rank sent.
        plain_bytes: What the same schedule would have sent uncompressed.
        seconds: The time of all collectives, start to finish, added up; None if unknown.
        residual_bytes: The memory that feedback and momentum hold between steps.
        rows: One row for each codec, dtype and reason.
        events: What the guard found and did, counted.
        fidelity: How the averaged gradients of the guard's last window compare with the uncompressed ones; None
            before the end of the first window.
        memory: The bytes of memory, by kind.
        buckets: One row for each bucket.
        auto: What "auto" decided, and why.
        plans: What "auto" compared last: predicted and measured milliseconds of a step, first to last bucket.
        uncompressed: What was asked for and is not compressed, as a sentence; empty if there is nothing.
    """

    policy: str
    feedback: bool | str
    steps: int
    messages: int
    wire_bytes: int
    plain_bytes: int
    seconds: float | None
    residual_bytes: int
    rows: tuple[Row, ...] = field(default=())
    events: dict[str, int] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    memory: dict[str, int] = field(default_factory=dict)
    buckets: tuple[BucketRow, ...] = field(default=())
    auto: tuple[str, ...] = ()
    plans: tuple[dict[str, Any], ...] = ()
    uncompressed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        values = asdict(self)
        for values_row, row in zip(values["rows"], self.rows, strict=True):
            values_row["names"] = list(row.names)
            values_row["saved_bytes"] = row.saved_bytes
        values["rows"] = list(values["rows"])
        values["buckets"] = [
            bucket | {"ratio": row.ratio} for bucket, row in zip(values["buckets"], self.buckets)
        ]
        return values

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        lines = format_table(_HEAD, self._cells(), _LEFT)
        if self.buckets:
            lines += ["", *format_table(_BUCKET_HEAD, self._bucket_cells(), _BUCKET_LEFT)]
            if len(self.buckets) > MAX_BUCKETS_SHOWN:
                lines.append(f"… {len(self.buckets) - MAX_BUCKETS_SHOWN} more buckets in to_dict()")
            lines.append("")
        return "\n".join([*filter(None, [self.uncompressed]), *lines, *self._tail()])

    def __rich__(self) -> Any:
        tables = [rich_table(f"dtcomm: {self.policy}", _HEAD, self._cells(), _LEFT)]
        if self.buckets:
            tables.append(rich_table("", _BUCKET_HEAD, self._bucket_cells(), _BUCKET_LEFT))
        return rich_group(*filter(None, [self.uncompressed]), *tables, *self._tail())

    def metrics(self) -> list[Metric]:
        """Return the metrics for Prometheus and TensorBoard."""
        counters: dict[str, tuple[float, str]] = {
            "steps_total": (self.steps, "steps of training"),
            "messages_total": (self.messages, "messages sent"),
            "wire_bytes_total": (self.wire_bytes, "bytes that this rank sent"),
            "plain_bytes_total": (self.plain_bytes, "bytes that it would have sent uncompressed"),
        }
        if self.seconds is not None:
            text = "start to finish of all collectives, added up"
            counters["collective_seconds_total"] = self.seconds, text
        metrics = [
            Metric(f"dtcomm_{name}", value, text, "counter") for name, (value, text) in counters.items()
        ]
        metrics.append(
            Metric("dtcomm_residual_bytes", self.residual_bytes, "memory of feedback and momentum")
        )
        error_help = "what encodings dropped over the gradient, of sampled steps"
        for row in self.rows:
            if row.relative_error is not None:
                labels = {"codec": row.codec, "dtype": row.dtype, "note": row.reason}
                metrics.append(Metric("dtcomm_relative_error", row.relative_error, error_help, labels=labels))
        if self.fidelity is not None:
            text = "cosine between the averaged gradients of a window and the uncompressed ones"
            metrics.append(Metric("dtcomm_gradient_cosine", self.fidelity.cosine, text))
            text = "norm of the averaged gradients of a window over that of the uncompressed ones"
            metrics.append(Metric("dtcomm_gradient_norm_ratio", self.fidelity.norm_ratio, text))
        for kind, count in self.events.items():
            metrics.append(
                Metric("dtcomm_guard_events_total", count, "events of the guard", "counter", {"kind": kind})
            )
        for bucket in self.buckets:
            labels = {"bucket": str(bucket.index), "codec": bucket.codec}
            if bucket.seconds is not None:
                text = "mean time of a bucket's message, start to finish"
                mean = bucket.seconds / max(1, bucket.messages)
                metrics.append(Metric("dtcomm_bucket_seconds", mean, text, labels=labels))
            if bucket.relative_error is not None:
                metrics.append(
                    Metric(
                        "dtcomm_bucket_relative_error",
                        bucket.relative_error,
                        f"{error_help}, by bucket",
                        labels=labels,
                    )
                )
        return metrics

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.codec,
                row.dtype,
                str(len(row.names)),
                f"{row.numel:,}",
                format_bytes(row.wire_bytes),
                f"{row.saved_bytes / row.plain_bytes:.1%}" if row.plain_bytes else "-",
                _format_error(row.relative_error),
                row.reason or _names(row.names),
            )
            for row in self.rows
        ]

    def _bucket_cells(self) -> list[tuple[str, ...]]:
        return [bucket.cells() for bucket in self.buckets[:MAX_BUCKETS_SHOWN]]

    def _tail(self) -> list[str]:
        duration = "" if self.seconds is None else f" in {self.seconds:.3f} s"
        memory = _format_memory(self.memory) or f"{format_bytes(self.residual_bytes)} of residuals"
        lines = [
            f"{self.steps} steps, {self.messages} messages: sent {format_bytes(self.wire_bytes)} instead of "
            f"{format_bytes(self.plain_bytes)}{duration}; "
            f"feedback {_format_feedback(self.feedback)}, {memory}"
        ]
        lines += self.auto
        if self.fidelity is not None:
            lines.append(f"guard: {self.fidelity}")
        if self.events:
            lines.append("guard: " + _format_counts(self.events))
        return lines


def describe_uncompressed(rows: Sequence[Row]) -> str:
    """Return what was asked for and is not compressed, as a sentence; empty if there is nothing.

    Parameters that a policy leaves uncompressed count only if it leaves all of them so.

    Args:
        rows: The rows of a report in which something was to be compressed.
    """
    nothing = all(row.codec == "none" for row in rows)
    named = [row for row in rows if row.refused or (nothing and row.reason.startswith(_BY_POLICY))]
    if not named:
        return ""
    elements = sum(row.numel for row in rows)
    parts = [
        f"{len(row.names)} parameters with {row.numel / elements:.0%} of the elements, "
        f"{_names(tuple(sorted(row.names)))} ({row.reason})"
        for row in named
    ]
    return f"{'nothing is' if nothing else 'not'} compressed although asked for: {'; '.join(parts)}"


def group_rows(totals: Iterable[tuple[str, ParameterTotals]]) -> tuple[Row, ...]:
    """Group (name, totals) pairs by codec, dtype and reason, the largest group first."""
    groups: dict[tuple[str, str, str], list[tuple[str, ParameterTotals]]] = {}
    for name, total in totals:
        groups.setdefault((total.codec, total.dtype, total.reason), []).append((name, total))
    rows = [
        Row(
            codec=key[0],
            dtype=key[1],
            reason=key[2],
            names=tuple(name for name, _ in members),
            numel=sum(total.numel for _, total in members),
            wire_bytes=round(sum(total.wire_bytes for _, total in members)),
            plain_bytes=round(sum(total.plain_bytes for _, total in members)),
            relative_error=_relative_error([total for _, total in members]),
            refused=members[0][1].refused,
        )
        for key, members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.numel))


def _format_error(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.1e}" if relative else "0"


def _format_counts(events: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}x" for kind, count in events.items())


def _relative_error(totals: list[ParameterTotals]) -> float | None:
    if all(total.lossless for total in totals):
        return 0.0
    signal = sum(total.signal for total in totals)
    error = sum(total.error for total in totals)
    return math.sqrt(error / signal) if signal > 0 else None


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _format_feedback(feedback: bool | str) -> str:
    return feedback if isinstance(feedback, str) else "on" if feedback else "off"


def _format_memory(sizes: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in sizes.items())
