"""What the collectives of a sharded model did, by module."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dtcomm.collectives import Work
from dtcomm.profiling import Metric
from dtcomm.profiling.tables import human


@dataclass
class Traffic:
    """What one module's collectives of a kind did on this rank: bytes sent, and what they were uncompressed.

    ``saved_calls`` counts collectives that were not needed at all; ``relative_error`` is what the last measured
    encoding lost, |lost| over |gradient + residual| on this rank.
    """

    codec: str
    calls: int = 0
    saved_calls: int = 0
    wire_bytes: int = 0
    plain_bytes: int = 0
    why: str = ""
    relative_error: float | torch.Tensor | None = None

    def add(self, work: Work, plain: int) -> None:
        """Count one call; ``plain`` bytes are what the tensor has that this rank sends."""
        self.calls += 1
        self.wire_bytes += work.wire_bytes
        self.plain_bytes += plain

    def save(self, plain: int) -> None:
        """Count a call that sent nothing, where plain FSDP sends ``plain`` bytes."""
        self.saved_calls += 1
        self.plain_bytes += plain


@dataclass
class Report:
    """``str()`` gives a table, ``to_dict()`` plain values; bytes are this rank's.

    ``notes`` are what torch does beside us, uncompressed. ``reference_bytes`` are the peers' parameters as this rank
    last knew them, which differences are taken to; ``buffer_bytes`` shared memory that is used again and again.
    ``events``: how often the guard saw what, and what it did then.
    """

    modules: dict[str, dict[str, Traffic]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    residual_bytes: int = 0
    reference_bytes: int = 0
    buffer_bytes: int = 0
    events: dict[str, int] = field(default_factory=dict)

    def read(self) -> Report:
        """Itself, after what was measured on a device has come: whoever asks waits for it."""
        for traffic in (each for kinds in self.modules.values() for each in kinds.values()):
            if isinstance(traffic.relative_error, torch.Tensor):
                traffic.relative_error = float(traffic.relative_error)
        return self

    def metrics(self) -> list[Metric]:
        """For Prometheus and TensorBoard, by kind of collective, over all modules."""
        found = [Metric("dtcomm_residual_bytes", self.residual_bytes, "memory of feedback")]
        kinds = dict.fromkeys(kind for traffic in self.modules.values() for kind in traffic)
        for name, text in (
            ("wire_bytes", "bytes that this rank sent"),
            ("plain_bytes", "bytes that it would have sent uncompressed"),
            ("calls", "collectives"),
        ):
            for kind in kinds:
                total = sum(getattr(t[kind], name) for t in self.modules.values() if kind in t)
                found.append(Metric(f"dtcomm_{name}_total", total, text, "counter", {"what": kind}))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Module name → "parameters" and "gradients" → counts."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{'module':<32} {'what':<10} {'codec':<28} {'calls':>6} {'sent':>10} {'instead of':>10} {'rel. error':>10}"
        ]
        for name, kinds in self.modules.items():
            for kind, traffic in kinds.items():
                error = "-" if traffic.relative_error is None else f"{traffic.relative_error:.1e}"
                lines.append(
                    f"{name or '(root)':<32} {kind:<10} {traffic.codec:<28} {traffic.calls:>6} "
                    f"{human(traffic.wire_bytes):>10} {human(traffic.plain_bytes):>10} {error:>10} "
                    f"{traffic.why}".rstrip()
                )
        lines.append(
            f"{human(self.residual_bytes)} of residuals, {human(self.reference_bytes)} of references, "
            f"{human(self.buffer_bytes)} of shared buffers"
        )
        if self.events:
            lines.append("guard: " + ", ".join(f"{kind} {count}x" for kind, count in self.events.items()))
        return "\n".join([*lines, *self.notes])
