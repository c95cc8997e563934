"""The report of a sharded model's collectives, by module; `State.report` and `ShardedOptimizer.report` return it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dtcomm.collectives import Work
from dtcomm.profiling import Metric
from dtcomm.profiling.tables import format_bytes, format_table

MAX_NAMES = 3  # modules that are named in the report's first line


@dataclass
class Traffic:
    """Counters of one kind of collective of one module, on this rank.

    Attributes:
        codec: Codec of the most recent call.
        calls: Number of calls.
        saved_calls: Number of calls that had nothing to send.
        wire_bytes: Bytes sent.
        plain_bytes: Bytes that the same calls would have sent uncompressed.
        reason: Why the most recent call was not compressed, or empty.
        fallback: Whether it was to be compressed, but cannot be.
        relative_error: Error of the last sampled encoding, relative (L2 norms) to gradient plus residual, or, for
            parameters, to this rank's exact shard of them.
    """

    codec: str
    calls: int = 0
    saved_calls: int = 0
    wire_bytes: int = 0
    plain_bytes: int = 0
    reason: str = ""
    fallback: bool = False
    relative_error: float | torch.Tensor | None = None

    def add(self, work: Work, plain_bytes: int) -> None:
        """Count one completed call, which would have sent ``plain_bytes`` uncompressed."""
        self.calls += 1
        self.wire_bytes += work.wire_bytes
        self.plain_bytes += plain_bytes

    def save(self, plain_bytes: int) -> None:
        """Count a call that had nothing to send, for which FSDP itself sends ``plain_bytes``."""
        self.saved_calls += 1
        self.plain_bytes += plain_bytes

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the report's table with numbers."""
        return (
            str(self.calls),
            format_bytes(self.wire_bytes),
            format_bytes(self.plain_bytes),
            f"{1 - self.wire_bytes / self.plain_bytes:.1%}" if self.plain_bytes else "-",
            "-" if self.relative_error is None else f"{self.relative_error:.1e}",
        )


@dataclass
class Report:
    """What a model's collectives sent on this rank; ``str()`` gives a table, ``to_dict()`` plain values.

    Attributes:
        modules: Module name → kind of collective (``"parameters"``, ``"gradients"``, ...) → counters.
        notes: What torch communicates itself, uncompressed, and why.
        residual_bytes: Memory of error feedback.
        reference_bytes: Memory of the reference parameters that ``delta:`` takes differences to.
        buffer_bytes: Shared memory of reused buffers.
        events: Guard event → number of times.
        unused: Why nothing is compressed in this job, or empty.
    """

    modules: dict[str, dict[str, Traffic]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    residual_bytes: int = 0
    reference_bytes: int = 0
    buffer_bytes: int = 0
    events: dict[str, int] = field(default_factory=dict)
    unused: str = ""

    def fetch_errors(self) -> Report:
        """Replace errors that are still on a device by floats, which waits for the device; returns the report."""
        for kinds in self.modules.values():
            for traffic in kinds.values():
                if isinstance(traffic.relative_error, torch.Tensor):
                    traffic.relative_error = float(traffic.relative_error)
        return self

    def metrics(self) -> list[Metric]:
        """Return the totals over all modules, by kind of collective, for Prometheus and TensorBoard."""
        metrics = [Metric("dtcomm_residual_bytes", self.residual_bytes, "memory of feedback")]
        kinds = dict.fromkeys(kind for traffic in self.modules.values() for kind in traffic)
        for name, text in (
            ("wire_bytes", "bytes that this rank sent"),
            ("plain_bytes", "bytes that this rank would have sent uncompressed"),
            ("calls", "collectives"),
        ):
            for kind in kinds:
                total = sum(getattr(t[kind], name) for t in self.modules.values() if kind in t)
                metrics.append(Metric(f"dtcomm_{name}_total", total, text, "counter", {"what": kind}))
        error_help = "error of the last sampled encoding, of the module where it is largest"
        for kind in kinds:
            errors = [float(t[kind].relative_error or 0.0) for t in self.modules.values() if kind in t]
            if any(errors):
                metrics.append(
                    Metric("dtcomm_relative_error", max(errors), error_help, labels={"what": kind})
                )
        return metrics

    def uncompressed(self) -> str:
        """Return what was to be compressed and cannot be, and why, as one line; empty if there is nothing."""
        if self.unused:
            return self.unused
        modules_of: dict[tuple[str, str], list[str]] = {}
        for name, kinds in self.modules.items():
            for kind, traffic in kinds.items():
                if traffic.fallback:
                    modules_of.setdefault((kind, traffic.reason), []).append(name or "(root)")
        parts = []
        for (kind, reason), modules in modules_of.items():
            total = sum(kind in kinds for kinds in self.modules.values())
            which = f"all {total} modules" if total > 1 else "the only module"
            if len(modules) < total:
                shown = ", ".join(modules[:MAX_NAMES]) + (", ..." if len(modules) > MAX_NAMES else "")
                which = f"{len(modules)} of {total} modules: {shown}"
            parts.append(f"{kind} of {which} ({reason})")
        return "not compressed although asked for: " + "; ".join(parts) if parts else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("module", "what", "codec", "calls", "sent", "instead of", "saved", "rel. error", "note")
        rows = [
            (name or "(root)", kind, traffic.codec, *traffic.cells(), traffic.reason)
            for name, kinds in self.modules.items()
            for kind, traffic in kinds.items()
        ]
        lines = format_table(head, rows, left={0, 1, 2, len(head) - 1})
        lines.append(
            f"{format_bytes(self.residual_bytes)} of residuals, {format_bytes(self.reference_bytes)} of references, "
            f"{format_bytes(self.buffer_bytes)} of shared buffers"
        )
        if self.events:
            lines.append("guard: " + ", ".join(f"{kind} {count}x" for kind, count in self.events.items()))
        return "\n".join([*filter(None, [self.uncompressed()]), *lines, *self.notes])
