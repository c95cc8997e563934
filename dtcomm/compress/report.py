"""What was compressed, with what, how much it saved and what it cost; and what was not, and why.

Parameters that share a codec, a dtype and a reason form one row. Bytes come from the wire: the collective
counts what this rank sent, and a message's bytes are split among its parameters in proportion to their
payloads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dtcomm.profiling.metrics import Metric
from dtcomm.profiling.tables import human, lined, rich_group, rich_table

SHOWN = 16  # buckets in a table
_HEAD = ("codec", "dtype", "params", "elements", "sent", "saved", "rel. error", "note")
_LEFT = {0, 1, len(_HEAD) - 1}
_BUCKET_HEAD = ("bucket", "codec", "params", "bytes", "sent", "ratio", "rel. error", "ms", "guard")
_BUCKET_LEFT = {0, 1, len(_BUCKET_HEAD) - 1}


@dataclass
class ParameterTotals:
    """Running totals of one parameter; ``error`` and ``signal`` are sums of squares over sampled steps."""

    numel: int
    codec: str = ""
    dtype: str = ""
    why: str = ""
    lossless: bool = True
    wire_bytes: float = 0.0
    plain_bytes: float = 0.0
    error: float = 0.0
    signal: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One group of parameters; bytes are this rank's, over all steps.

    ``plain_bytes`` is what the same schedule would have sent uncompressed. ``relative_error`` is
    ``|what the encodings dropped| / |gradient|`` over the sampled steps; None before the first one.
    """

    codec: str
    dtype: str
    why: str
    names: tuple[str, ...]
    numel: int
    wire_bytes: int
    plain_bytes: int
    relative_error: float | None

    @property
    def saved_bytes(self) -> int:
        return self.plain_bytes - self.wire_bytes


def total_seconds(times: Iterable[float | None]) -> float | None:
    """The sum of the times; None if any is unknown, as those of operations on a CUDA stream are."""
    total = 0.0
    for seconds in times:
        if seconds is None:
            return None
        total += seconds
    return total


@dataclass(frozen=True, kw_only=True)
class BucketRow:
    """One message, as it has been since its bucket's parameters and codecs last changed.

    ``nbytes`` are its gradients', uncompressed; ``wire_bytes`` and ``plain_bytes`` (uncompressed by the same schedule)
    this rank's, over ``messages`` of them, which took ``seconds``, start to finish (None if unknown);
    ``events`` the guard's about its
    parameters, as long as there has been one.
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
        """Uncompressed over sent; None before the first message."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else None

    def cells(self) -> tuple[str, ...]:
        """As the tables have it, sizes and time of one message."""
        count = max(1, self.messages)
        return (
            str(self.index),
            self.codec,
            str(self.parameters),
            human(self.nbytes),
            human(self.wire_bytes / count),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
            _error(self.relative_error),
            "-" if self.seconds is None else f"{self.seconds / count * 1e3:.2f}",
            _counted(self.events),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """``str()`` gives tables, as does rich's print; ``to_dict()`` plain values and ``to_json()`` their text.

    ``wire_bytes`` and ``seconds`` (start to finish of every collective, added up; None if unknown)
    are this rank's, over
    ``steps`` steps in ``messages`` messages; ``residual_bytes`` is the memory that feedback and momentum hold between
    the steps, and ``memory`` says by what, in bytes; ``events`` counts what the guard saw and did. ``auto`` is
    what "auto" decided and why, and ``plans`` what it compared last: predicted and measured milliseconds of a step from
    its first bucket to its last.
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
    memory: dict[str, int] = field(default_factory=dict)
    buckets: tuple[BucketRow, ...] = field(default=())
    auto: tuple[str, ...] = ()
    plans: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
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
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        lines = lined(_HEAD, self._cells(), _LEFT)
        if self.buckets:
            lines += ["", *lined(_BUCKET_HEAD, self._bucket_cells(), _BUCKET_LEFT)]
            if len(self.buckets) > SHOWN:
                lines.append(f"… {len(self.buckets) - SHOWN} more buckets in to_dict()")
            lines.append("")
        return "\n".join([*lines, *self._tail()])

    def __rich__(self) -> Any:
        tables = [rich_table(f"dtcomm: {self.policy}", _HEAD, self._cells(), _LEFT)]
        if self.buckets:
            tables.append(rich_table("", _BUCKET_HEAD, self._bucket_cells(), _BUCKET_LEFT))
        return rich_group(*tables, *self._tail())

    def metrics(self) -> list[Metric]:
        """For Prometheus and TensorBoard."""
        counters: dict[str, tuple[float, str]] = {
            "steps_total": (self.steps, "steps of training"),
            "messages_total": (self.messages, "messages sent"),
            "wire_bytes_total": (self.wire_bytes, "bytes that this rank sent"),
            "plain_bytes_total": (self.plain_bytes, "bytes that it would have sent uncompressed"),
        }
        if self.seconds is not None:
            counters["collective_seconds_total"] = (
                self.seconds,
                "start to finish of all collectives, added up",
            )
        found = [Metric(f"dtcomm_{name}", value, text, "counter") for name, (value, text) in counters.items()]
        found.append(Metric("dtcomm_residual_bytes", self.residual_bytes, "memory of feedback and momentum"))
        said = "what encodings dropped over the gradient, of sampled steps"
        for row in self.rows:
            if row.relative_error is not None:
                labels = {"codec": row.codec, "dtype": row.dtype, "note": row.why}
                found.append(Metric("dtcomm_relative_error", row.relative_error, said, labels=labels))
        for kind, count in self.events.items():
            found.append(
                Metric("dtcomm_guard_events_total", count, "what the guard saw", "counter", {"kind": kind})
            )
        for bucket in self.buckets:
            labels = {"bucket": str(bucket.index), "codec": bucket.codec}
            text = "mean time of a bucket's message, start to finish"
            if bucket.seconds is not None:
                mean = bucket.seconds / max(1, bucket.messages)
                found.append(Metric("dtcomm_bucket_seconds", mean, text, labels=labels))
            if bucket.relative_error is not None:
                found.append(
                    Metric(
                        "dtcomm_bucket_relative_error",
                        bucket.relative_error,
                        f"{said}, by bucket",
                        labels=labels,
                    )
                )
        return found

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.codec,
                row.dtype,
                str(len(row.names)),
                f"{row.numel:,}",
                human(row.wire_bytes),
                f"{row.saved_bytes / row.plain_bytes:.1%}" if row.plain_bytes else "-",
                _error(row.relative_error),
                row.why or _names(row.names),
            )
            for row in self.rows
        ]

    def _bucket_cells(self) -> list[tuple[str, ...]]:
        return [bucket.cells() for bucket in self.buckets[:SHOWN]]

    def _tail(self) -> list[str]:
        taken = "" if self.seconds is None else f" in {self.seconds:.3f} s"
        lines = [
            f"{self.steps} steps, {self.messages} messages: sent {human(self.wire_bytes)} instead of "
            f"{human(self.plain_bytes)}{taken}; "
            f"feedback {_kind(self.feedback)}, {_memory(self.memory) or human(self.residual_bytes) + ' of residuals'}"
        ]
        lines += self.auto
        if self.events:
            lines.append("guard: " + _counted(self.events))
        return lines


def rows(tallies: Iterable[tuple[str, ParameterTotals]]) -> tuple[Row, ...]:
    """Group (name, tally) pairs, the largest group first."""
    groups: dict[tuple[str, str, str], list[tuple[str, ParameterTotals]]] = {}
    for name, tally in tallies:
        groups.setdefault((tally.codec, tally.dtype, tally.why), []).append((name, tally))
    made = [
        Row(
            codec=key[0],
            dtype=key[1],
            why=key[2],
            names=tuple(name for name, _ in members),
            numel=sum(tally.numel for _, tally in members),
            wire_bytes=round(sum(tally.wire_bytes for _, tally in members)),
            plain_bytes=round(sum(tally.plain_bytes for _, tally in members)),
            relative_error=_relative_error([tally for _, tally in members]),
        )
        for key, members in groups.items()
    ]
    return tuple(sorted(made, key=lambda row: -row.numel))


def _error(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.1e}" if relative else "0"


def _counted(events: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}x" for kind, count in events.items())


def _relative_error(tallies: list[ParameterTotals]) -> float | None:
    if all(tally.lossless for tally in tallies):
        return 0.0
    signal = sum(tally.signal for tally in tallies)
    error = sum(tally.error for tally in tallies)
    return math.sqrt(error / signal) if signal > 0 else None


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _kind(feedback: bool | str) -> str:
    return feedback if isinstance(feedback, str) else "on" if feedback else "off"


def _memory(held: dict[str, int]) -> str:
    return ", ".join(f"{human(size)} of {what}" for what, size in held.items())
