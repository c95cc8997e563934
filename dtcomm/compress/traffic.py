"""Counters of what integrations send, and the rows of their reports that are made of them.

An integration counts by parameter (`ParameterTotals`) or by module and kind of collective (`Traffic`). `group_rows` and
`group_traffic` make a `Row` for each combination of codec, dtype and reason, `message_rows` a `MessageRow` for each
bucket, module or layer. Bytes are those that this rank sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtcomm.profiling.summary import format_bytes
from dtcomm.work import Work

#: Why a message is left uncompressed although it could be compressed, as options ask.
SMALL = "small: predicted to be faster uncompressed"


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
    """The totals of one parameter; ``error`` and ``signal`` are sums of squares over the sampled steps.

    ``messages`` has the number of messages of each layout that contained the parameter, by the layout's identity.
    """

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
    messages: dict[int, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Traffic:
    """Counters of one kind of collective of one module or layer, on this rank; ``str()`` gives one line.

    Attributes:
        codec: Codec of the most recent call.
        what: What is communicated, such as ``"gradients"``.
        dtype: Type of the elements, or empty before the first call.
        tensors: Number of parameters in a call.
        numel: Elements of a call, all ranks' shards together.
        calls: Number of calls.
        saved_calls: Number of calls that had nothing to send.
        wire_bytes: Bytes sent.
        plain_bytes: Bytes that the same calls would have sent uncompressed.
        seconds: Time of the calls, start to finish, added up; None if it is not known.
        reason: Why the most recent call was not compressed, or empty.
        fallback: Whether it was to be compressed, but cannot be.
        relative_error: Error of the last sampled encoding, relative (L2 norms) to gradient plus residual, or, for
            parameters, to this rank's exact shard of them.
    """

    codec: str
    what: str = ""
    dtype: str = ""
    tensors: int = 1
    numel: int = 0
    calls: int = 0
    saved_calls: int = 0
    wire_bytes: int = 0
    plain_bytes: int = 0
    seconds: float | None = 0.0
    reason: str = ""
    fallback: bool = False
    relative_error: float | torch.Tensor | None = None

    def add(self, work: Work, plain_bytes: int) -> None:
        """Count one completed call, which would have sent ``plain_bytes`` uncompressed."""
        self.calls += 1
        self.wire_bytes += work.wire_bytes
        self.plain_bytes += plain_bytes
        self.seconds = total_seconds((self.seconds, work.seconds))

    def save(self, plain_bytes: int) -> None:
        """Count a call that had nothing to send, for which FSDP itself sends ``plain_bytes``."""
        self.saved_calls += 1
        self.plain_bytes += plain_bytes

    def fetch_error(self) -> float | None:
        """Return the error as a float; the host waits if it is still on a device."""
        if isinstance(self.relative_error, torch.Tensor):
            self.relative_error = float(self.relative_error)
        return self.relative_error

    def __str__(self) -> str:
        error = "" if self.relative_error is None else f", relative error {format_error(self.fetch_error())}"
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.calls} calls in {self.codec}{reason}: sent {format_bytes(self.wire_bytes)} instead of "
            f"{format_bytes(self.plain_bytes)}{error}"
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One group of tensors; counts and bytes are this rank's, over all steps of this run.

    Attributes:
        what: What was communicated, such as ``"gradients"``.
        codec: What it is compressed with.
        dtype: The dtype before that.
        reason: Why it is not compressed.
        names: The parameters, modules or layers.
        numel: Their elements.
        calls: The collectives that carried at least one of them.
        wire_bytes: What this rank sent.
        plain_bytes: What the same calls would have sent uncompressed.
        relative_error: The norm of what the encodings lost over the norm of what was to be sent; None before the first
            sample.
        refused: Whether a scheme was asked for that does not apply to them.
    """

    what: str = "gradients"
    codec: str
    dtype: str
    reason: str
    names: tuple[str, ...]
    numel: int
    calls: int = 0
    wire_bytes: int
    plain_bytes: int
    relative_error: float | None
    refused: bool = False

    @property
    def saved_bytes(self) -> int:
        """The bytes that were saved."""
        return self.plain_bytes - self.wire_bytes

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return len(self.names)


@dataclass(frozen=True, kw_only=True)
class MessageRow:
    """The collective of one bucket, module or layer.

    Attributes:
        name: The bucket, module or layer.
        what: What is communicated.
        codec: Its codecs.
        dtype: The dtype before that.
        tensors: The number of parameters.
        numel: Their elements.
        calls: How often it was sent.
        wire_bytes: What this rank sent, all calls together.
        plain_bytes: What the same calls would have sent uncompressed.
        seconds: The time of its calls, start to finish, all together; None if unknown.
        relative_error: As of `Row`.
        reason: Why it is not compressed.
        events: The guard's events about it, counted over the whole run.
    """

    name: str
    what: str
    codec: str
    dtype: str
    tensors: int
    numel: int
    calls: int
    wire_bytes: int
    plain_bytes: int
    seconds: float | None
    relative_error: float | None
    reason: str = ""
    events: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Uncompressed bytes over sent bytes; None before the first byte."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else None


def group_rows(totals: Iterable[tuple[str, ParameterTotals]], what: str = "gradients") -> tuple[Row, ...]:
    """Group (name, totals) pairs by codec, dtype and reason, the largest group first."""
    groups: dict[tuple[str, str, str], list[tuple[str, ParameterTotals]]] = {}
    for name, total in totals:
        groups.setdefault((total.codec, total.dtype, total.reason), []).append((name, total))
    rows = []
    for key, members in groups.items():
        messages: dict[int, int] = {}
        for _, total in members:
            messages |= total.messages
        rows.append(
            Row(
                what=what,
                codec=key[0],
                dtype=key[1],
                reason=key[2],
                names=tuple(name for name, _ in members),
                numel=sum(total.numel for _, total in members),
                calls=sum(messages.values()),
                wire_bytes=round(sum(total.wire_bytes for _, total in members)),
                plain_bytes=round(sum(total.plain_bytes for _, total in members)),
                relative_error=relative_error([total for _, total in members]),
                refused=members[0][1].refused,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.numel))


def group_traffic(traffic: Sequence[tuple[str, Traffic]]) -> tuple[Row, ...]:
    """Group (module, counters) pairs by what they are, codec, dtype and reason, in the order of the first module."""
    groups: dict[tuple[str, str, str, str], list[tuple[str, Traffic]]] = {}
    for name, counters in traffic:
        key = (counters.what, counters.codec, counters.dtype, counters.reason)
        groups.setdefault(key, []).append((name, counters))
    rows = []
    for (what, codec, dtype, reason), members in groups.items():
        errors = [error for _, counters in members if (error := counters.fetch_error()) is not None]
        rows.append(
            Row(
                what=what,
                codec=codec,
                dtype=dtype,
                reason=reason,
                names=tuple(name for name, _ in members),
                numel=sum(counters.numel for _, counters in members),
                calls=sum(counters.calls for _, counters in members),
                wire_bytes=sum(counters.wire_bytes for _, counters in members),
                plain_bytes=sum(counters.plain_bytes for _, counters in members),
                relative_error=max(errors, default=None),
                refused=members[0][1].fallback,
            )
        )
    return tuple(rows)


def message_rows(
    traffic: Sequence[tuple[str, Traffic]], events: Mapping[tuple[str, str], dict[str, int]] | None = None
) -> tuple[MessageRow, ...]:
    """Return a row for each module and its counters; ``events`` counts the guard's by (module, kind)."""
    return tuple(
        MessageRow(
            name=name,
            what=counters.what,
            codec=counters.codec,
            dtype=counters.dtype,
            tensors=counters.tensors,
            numel=counters.numel,
            calls=counters.calls,
            wire_bytes=counters.wire_bytes,
            plain_bytes=counters.plain_bytes,
            seconds=counters.seconds,
            relative_error=counters.fetch_error(),
            reason=counters.reason,
            events=(events or {}).get((name, counters.what), {}),
        )
        for name, counters in traffic
    )


def format_error(relative: float | None) -> str:
    """Return a relative error as text; ``-`` if it is not known."""
    return "-" if relative is None else f"{relative:.1e}" if relative else "0"


def relative_error(totals: Sequence[ParameterTotals]) -> float | None:
    """Return |what was lost| / |gradient| over the sampled steps; None before the first of them."""
    if all(total.lossless for total in totals):
        return 0.0
    signal = sum(total.signal for total in totals)
    error = sum(total.error for total in totals)
    return math.sqrt(error / signal) if signal > 0 else None
