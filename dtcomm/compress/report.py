"""What was compressed, with what, how much it saved and what it cost; and what was not, and why.

Parameters that share a codec, a dtype and a reason form one row. Bytes come from the wire: the collective
counts what this rank sent, and a message's bytes are split among its parameters in proportion to their
payloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Tally:
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


@dataclass(frozen=True, kw_only=True)
class Report:
    """``str()`` gives a table, ``to_dict()`` plain values.

    ``wire_bytes`` and ``seconds`` (start to finish of every collective, added up) are this rank's, over
    ``steps`` steps in ``messages`` messages; ``residual_bytes`` is the memory that feedback and momentum hold between
    the steps, and ``memory`` says by what, in bytes; ``events`` counts what the guard saw and did.
    """

    policy: str
    feedback: bool | str
    steps: int
    messages: int
    wire_bytes: int
    plain_bytes: int
    seconds: float
    residual_bytes: int
    rows: tuple[Row, ...] = field(default=())
    events: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for values_row, row in zip(values["rows"], self.rows, strict=True):
            values_row["names"] = list(row.names)
            values_row["saved_bytes"] = row.saved_bytes
        values["rows"] = list(values["rows"])
        return values

    def __str__(self) -> str:
        head = ("codec", "dtype", "params", "elements", "sent", "saved", "rel. error", "note")
        table = [head]
        for row in self.rows:
            error = (
                "-"
                if row.relative_error is None
                else f"{row.relative_error:.1e}"
                if row.relative_error
                else "0"
            )
            saved = f"{row.saved_bytes / row.plain_bytes:.1%}" if row.plain_bytes else "-"
            table.append(
                (
                    row.codec,
                    row.dtype,
                    str(len(row.names)),
                    f"{row.numel:,}",
                    human(row.wire_bytes),
                    saved,
                    error,
                    row.why or _names(row.names),
                )
            )
        widths = [max(len(line[column]) for line in table) for column in range(len(head))]
        left = {0, 1, len(head) - 1}
        lines = [
            "  ".join(
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        lines.append(
            f"{self.steps} steps, {self.messages} messages: sent {human(self.wire_bytes)} instead of "
            f"{human(self.plain_bytes)} in {self.seconds:.3f} s; "
            f"feedback {_kind(self.feedback)}, {_memory(self.memory) or human(self.residual_bytes) + ' of residuals'}"
        )
        if self.events:
            lines.append("guard: " + ", ".join(f"{kind} {count}x" for kind, count in self.events.items()))
        return "\n".join(lines)


def rows(tallies: Iterable[tuple[str, Tally]]) -> tuple[Row, ...]:
    """Group (name, tally) pairs, the largest group first."""
    groups: dict[tuple[str, str, str], list[tuple[str, Tally]]] = {}
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


def human(count: float) -> str:
    """Bytes with a binary unit: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _relative_error(tallies: list[Tally]) -> float | None:
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
