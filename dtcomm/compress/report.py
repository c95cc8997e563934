"""The report of every integration: what was compressed, with what, what that saved and cost, and whether it paid.

DDP, FSDP, `ShardedOptimizer`, tensor and context parallelism and `LocalSGD` count differently, but all of them fill in
the same `Report`: one `Row` for each combination of codec, dtype and reason, one `MessageRow` for each bucket, module
or layer, and totals. `Report` alone makes text, plain values and metrics of them. Bytes are those that this rank sent.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dtcomm.compress.measurements import Fidelity
from dtcomm.compress.payoff import Payoff, unmeasured
from dtcomm.compress.policy import default_policy
from dtcomm.compress.traffic import (
    SMALL,
    MessageRow,
    Row,
    Traffic,
    format_error,
    group_traffic,
    message_rows,
    total_seconds,
)
from dtcomm.profiling.metrics import Metric
from dtcomm.profiling.summary import format_bytes, format_table

MAX_MESSAGES_SHOWN = 16
#: From this relative error on a legend line says what such an error means.
LARGE_ERROR = 0.2
DEFAULT_RULES = str(default_policy("none")).removesuffix("none")  # before every codec that is given alone
_BY_POLICY = ("policy:", "no rule matches")  # how reasons of a policy begin
#: Column → meaning.
COLUMNS = {
    "what": "what was communicated",
    "codec": "what it was compressed with",
    "dtype": "its type before that",
    "tensors": "number of parameters, modules or layers",
    "elements": "their elements",
    "calls": "collectives that carried it",
    "sent": "bytes that this rank sent",
    "instead of": "bytes that the same calls would have sent uncompressed",
    "saved": "the share of those that was not sent",
    "rel. error": "|what encodings lost| / |what was to be sent|, L2 norms, in the sampled steps",
    "note": "why it was not compressed, or its names",
}
MESSAGE_COLUMNS = {
    "message": "one collective of each step",
    **COLUMNS,
    "ms": "mean time of a call, start to finish",
    "guard": "the guard's events",
}
_LEFT = {"message", "what", "codec", "dtype", "note", "guard"}


class RankReport(ABC):
    """What every report of a rank can be asked for; ``str()`` is its whole text.

    Attributes:
        rank: This rank in its group.
    """

    rank: int

    @abstractmethod
    def summary(self) -> str:
        """Return the text in short."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain values: everything that the text says."""

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def print(self, *, verbose: bool = False, all_ranks: bool = False) -> None:
        """Print `summary` on the group's first rank.

        Args:
            verbose: Print the whole text instead, such as tables by codec and by message. Default: False.
            all_ranks: Print on every rank, each with its own counters. Default: False.
        """
        if all_ranks or self.rank == 0:
            print(self if verbose else self.summary(), flush=True)


@dataclass(frozen=True, kw_only=True)
class Report(RankReport):
    """The report of one rank.

    `summary` gives six lines, ``str()`` and rich's print tables, `to_dict` plain values, `to_json` their text.

    Attributes:
        integration: What communicated: ``"DDP"``, ``"FSDP"``, ``"ShardedOptimizer"``, ``"TP"``, ``"context parallel"``
            or ``"LocalSGD"``.
        rank: This rank in its group.
        world_size: The number of ranks of the group.
        policy: What was asked for.
        feedback: The kind of error feedback.
        feedback_reason: Why, if ``feedback="auto"`` chose it.
        steps: The number of steps of this run; None if it is not known.
        earlier_steps: The steps of the runs before, if this one continued from a checkpoint.
        messages: The number of collectives of this run.
        wire_bytes: What this rank sent.
        plain_bytes: What the same calls would have sent uncompressed.
        leaving_bytes: What all ranks of this rank's host together sent to other hosts meanwhile; None if unknown.
        seconds: The time of all collectives, start to finish, added up; None if unknown.
        residual_bytes: The memory that feedback and momentum hold between steps.
        rows: One row for each codec, dtype and reason.
        by_message: One row for each bucket, module or layer.
        modules: Module → kind of collective → counters, where the integration counts by module.
        events: What the guard found and did, counted.
        fidelity: How the averaged gradients of the guard's last window compare with the uncompressed ones; None
            before the end of the first window.
        memory: The bytes of memory, by kind.
        auto: What "auto" decided, and why.
        plans: What "auto" compared last: measured milliseconds of a step, first to last bucket.
        notes: What is communicated by others, uncompressed, and why.
        uncompressed: What was asked for and is not compressed, as a sentence; empty if there is nothing.
        payoff: Whether compression paid, from pairs of steps that were measured; None: there were none.
        unmeasured: What the text says instead where something is compressed.
    """

    integration: str = "DDP"
    rank: int = 0
    world_size: int = 1
    policy: str
    feedback: bool | str
    feedback_reason: str = ""
    steps: int | None
    earlier_steps: int = 0
    messages: int
    wire_bytes: int
    plain_bytes: int
    leaving_bytes: int | None = None
    seconds: float | None
    residual_bytes: int
    rows: tuple[Row, ...] = field(default=())
    by_message: tuple[MessageRow, ...] = field(default=())
    modules: dict[str, dict[str, Traffic]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    memory: dict[str, int] = field(default_factory=dict)
    auto: tuple[str, ...] = ()
    plans: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    uncompressed: str = ""
    payoff: Payoff | None = None
    unmeasured: str = unmeasured()

    @classmethod
    def of_traffic(
        cls,
        traffic: Sequence[tuple[str, Traffic]],
        message_events: Mapping[tuple[str, str], dict[str, int]] | None = None,
        unit: str = "",
        **rest: Any,
    ) -> Report:
        """Return the report of an integration that counts by module and kind of collective.

        Args:
            traffic: (name of the module, counters) pairs.
            message_events: (module, what is communicated) → counts of the guard's events. Default: none.
            unit: What the modules are called in the sentence on what was asked for and is not compressed. Default: the
                report has no such sentence.
            rest: The attributes that do not follow from the counters.
        """
        rows = group_traffic(traffic)
        totals: dict[str, Any] = {
            "messages": sum(row.calls for row in rows),
            "wire_bytes": sum(row.wire_bytes for row in rows),
            "plain_bytes": sum(row.plain_bytes for row in rows),
            "seconds": total_seconds(counters.seconds for _, counters in traffic),
            "rows": rows,
            "by_message": message_rows(traffic, message_events),
            "uncompressed": describe_uncompressed(rows, unit) if unit else "",
        }
        return cls(**totals | rest)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: everything that the text says, and more."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("auto", "plans", "notes"):
            values[name] = list(values[name])
        values["rows"] = [
            asdict(row) | {"names": list(row.names), "saved_bytes": row.saved_bytes} for row in self.rows
        ]
        values["by_message"] = [asdict(row) | {"ratio": row.ratio} for row in self.by_message]
        values["modules"] = {
            name: {kind: asdict(traffic) for kind, traffic in kinds.items()}
            for name, kinds in self.modules.items()
        }
        values["fidelity"] = None if self.fidelity is None else asdict(self.fidelity)
        values["payoff"] = (
            None if self.payoff is None else asdict(self.payoff) | {"verdict": self.payoff.verdict}
        )
        values["legend"] = self.legend()
        return values

    def legend(self) -> list[str]:
        """Return what all columns mean, and what a large relative error means if a row has one."""
        columns = MESSAGE_COLUMNS if self.by_message else COLUMNS
        lines = [", ".join(f"{name}: {meaning}" for name, meaning in columns.items())]
        if self.modules:
            lines.append("rel. error of several modules: the largest of their last samples")
        if any(row.calls for row in self.rows) and sum(row.calls for row in self.rows) > self.messages:
            lines.append("calls: one message carries several rows, so their sum exceeds the total")
        lines += _explain_large_error(self.rows, self.feedback)
        return lines

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def summary(self) -> str:
        """Return six lines: what was asked for, what was sent, what of it was compressed, the memory, the errors, and
        whether compression paid.
        """
        steps = "" if self.steps is None else f", {self.steps} steps"
        fewer = self.plain_bytes / self.wire_bytes if self.wire_bytes else 1.0
        errors = [
            f"{row.relative_error:.2%} of {row.what} in {row.codec}"
            for row in self.rows
            if row.codec != "none" and row.relative_error is not None
        ]
        memory = self.memory or {"residuals": self.residual_bytes}
        lines = {
            "sent": f"{format_bytes(self.wire_bytes)} instead of {format_bytes(self.plain_bytes)}"
            + (f" ({fewer:.1f} times fewer)" if fewer > 1.05 else "")
            + (f", {format_bytes(self.leaving_bytes)} left this host" if self.leaving_bytes else "")
            + (f", in {self.seconds:.3g} s of collectives" if self.seconds else ""),
            "compressed": self.uncompressed or self._coverage(),
            "memory": ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in memory.items() if size)
            or "none",
            "errors": "; ".join(
                [", ".join(errors) or "not sampled", *_guard_lines(self.fidelity, self.events)]
            ),
            "verdict": self._verdict(),
        }
        return "\n".join([self._title() + steps, *(f"  {name:<12}{text}" for name, text in lines.items())])

    def _coverage(self) -> str:
        """Return which share of the bytes is compressed, and why the others are not."""
        if not self.plain_bytes:
            return "nothing was sent yet"
        plain = [row for row in self.rows if row.codec == "none"]
        share = 100 * (1 - sum(row.plain_bytes for row in plain) / self.plain_bytes)
        reasons = [
            f"{row.tensors} tensors ({row.reason.removeprefix('policy: ') or 'codec none'})" for row in plain
        ]
        return f"{share:.4g}% of the bytes" + (f"; all but {', '.join(reasons)}" if reasons else "")

    def _verdict(self) -> str:
        """Return whether compression paid, or how to know it."""
        if self.payoff is None and self.wire_bytes >= self.plain_bytes:
            return "nothing is compressed" if self.plain_bytes else "nothing was sent yet"
        return str(self.payoff or self.unmeasured)

    def metrics(self) -> list[Metric]:
        """Return the metrics for Prometheus and TensorBoard."""
        metrics = [Metric("dtcomm_messages_total", self.messages, "collectives", "counter")]
        if self.steps is not None:
            metrics.append(Metric("dtcomm_steps_total", self.steps, "steps of training", "counter"))
        if self.leaving_bytes is not None:
            text = "bytes that the ranks of this host sent to other hosts"
            metrics.append(Metric("dtcomm_leaving_bytes_total", self.leaving_bytes, text, "counter"))
        if self.seconds is not None:
            text = "start to finish of all collectives, added up"
            metrics.append(Metric("dtcomm_collective_seconds_total", self.seconds, text, "counter"))
        for name, text in (
            ("wire_bytes", "bytes that this rank sent"),
            ("plain_bytes", "bytes that it would have sent uncompressed"),
            ("calls", "collectives"),
        ):
            # One collective carries several rows of codecs, and one row of messages.
            rows: Sequence[Row | MessageRow] = self.by_message if name == "calls" else self.rows
            for what in dict.fromkeys(row.what for row in rows):
                total = sum(getattr(row, name) for row in rows if row.what == what)
                metrics.append(
                    Metric(f"dtcomm_{name}_total", total, text, "counter", {"what": what}, name == "calls")
                )
        metrics.append(
            Metric("dtcomm_residual_bytes", self.residual_bytes, "memory of feedback and momentum")
        )
        error_help = "what encodings dropped over what was to be sent, of sampled steps"
        # Labels that stay from step to step: what is not compressed has no error, and the reason why may change.
        lossy = [row for row in self.rows if row.codec != "none" and row.relative_error is not None]
        for (what, name, dtype), alike in _grouped(lossy, "what", "codec", "dtype"):
            labels = {"what": what, "codec": name, "dtype": dtype}
            metrics.append(Metric("dtcomm_relative_error", _largest_error(alike), error_help, labels=labels))
        for (name, what), alike in _grouped(self.by_message, "name", "what"):
            labels = {"message": name, "what": what}
            seconds = total_seconds(message.seconds for message in alike)
            calls = sum(message.calls for message in alike)
            if seconds is not None and calls:
                text = "mean time of a message, start to finish"
                metrics.append(
                    Metric("dtcomm_message_seconds", seconds / calls, text, labels=labels, detail=True)
                )
            if any(message.relative_error is not None for message in alike):
                text = f"{error_help}, by message"
                error = _largest_error(alike)
                metrics.append(
                    Metric("dtcomm_message_relative_error", error, text, labels=labels, detail=True)
                )
        return metrics + _guard_metrics(self.fidelity, self.events)

    def _title(self) -> str:
        policy = self.policy.replace(DEFAULT_RULES, "")
        feedback = self.feedback if isinstance(self.feedback, str) else "on" if self.feedback else "off"
        feedback += f" ({self.feedback_reason})" if self.feedback_reason else ""
        return (
            f"dtcomm {self.integration}: {policy}, feedback {feedback}, rank {self.rank} of {self.world_size}"
        )

    def _table(self) -> tuple[list[str], list[tuple[str, ...]], set[int]]:
        """Return head, rows and the left-aligned columns, as `format_table` takes them."""
        # The gradients and the parameters of a module are the same elements: their sum says nothing.
        one_kind = len({row.what for row in self.rows}) == 1
        total = (
            "total",
            "",
            "",
            str(len({name for row in self.rows for name in row.names})) if one_kind else "",
            f"{sum(row.numel for row in self.rows):,}" if one_kind else "",
            str(self.messages),
            *_byte_cells(self.wire_bytes, self.plain_bytes),
            "",
            "",
        )
        rows = [
            (row.what, row.codec, row.dtype, *_number_cells(row), row.reason or _names(row.names))
            for row in self.rows
        ]
        return list(COLUMNS), [*rows, total], _left(COLUMNS)

    def _lines(self) -> Iterator[str]:
        if self.uncompressed:
            yield self.uncompressed
        yield self._title()
        yield from format_table(*self._table())
        if self.by_message:
            yield ""
            rows = [_message_cells(row) for row in self.by_message[:MAX_MESSAGES_SHOWN]]
            yield from format_table(list(MESSAGE_COLUMNS), rows, _left(MESSAGE_COLUMNS))
            if len(self.by_message) > MAX_MESSAGES_SHOWN:
                yield f"… {len(self.by_message) - MAX_MESSAGES_SHOWN} more messages in to_dict()"
        yield ""
        earlier = f" after {self.earlier_steps} steps of earlier runs" if self.earlier_steps else ""
        steps = "" if self.steps is None else f"{self.steps} steps, "
        yield f"this run{earlier}: {steps}{self.messages} messages"
        yield from self.summary().splitlines()[1:]
        yield from (*self.auto, *self.notes)
        if self.rows:
            yield f"rel. error: {COLUMNS['rel. error']}; report.legend() explains every column"
            yield from _explain_large_error(self.rows, self.feedback)


def _grouped(rows: Iterable[Any], *names: str) -> Iterable[tuple[tuple[str, ...], list[Any]]]:
    """Return rows with the same values of these attributes together."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return groups.items()


def _largest_error(rows: Iterable[Row | MessageRow]) -> float:
    return max(row.relative_error for row in rows if row.relative_error is not None)


def _guard_lines(fidelity: Fidelity | None, events: Mapping[str, int]) -> list[str]:
    """Return the lines about what the guard measured and did."""
    lines = [] if fidelity is None else [f"guard: {fidelity}"]
    return [*lines, "guard: " + _format_counts(events)] if events else lines


def _guard_metrics(fidelity: Fidelity | None, events: Mapping[str, int]) -> list[Metric]:
    """Return the metrics of what the guard measured and did."""
    metrics = []
    if fidelity is not None:
        text = "cosine between the averaged gradients of a window and the uncompressed ones"
        metrics.append(Metric("dtcomm_gradient_cosine", fidelity.cosine, text))
        text = "norm of the averaged gradients of a window over that of the uncompressed ones"
        metrics.append(Metric("dtcomm_gradient_norm_ratio", fidelity.norm_ratio, text))
    return metrics + [
        Metric("dtcomm_guard_events_total", count, "events of the guard", "counter", {"kind": kind})
        for kind, count in events.items()
    ]


def _explain_large_error(rows: Sequence[Row], feedback: bool | str) -> list[str]:
    """Return what the largest relative error means, if it is that of a scheme which sends a part at a time."""
    large = [row for row in rows if (row.relative_error or 0.0) >= LARGE_ERROR]
    if not large:
        return []
    row = max(large, key=lambda row: row.relative_error or 0.0)
    error = row.relative_error or 0.0
    sends_part = row.codec.startswith(("powersgd", "topk", "dgc"))
    part = (
        f"a part with {math.sqrt(1 - error**2):.0%} of the norm"
        if sends_part and error < 1
        else "only a part"
    )
    rest = (
        "the residuals keep the rest for later steps"
        if feedback not in (False, "none", "")
        else "without error feedback the rest is lost"
    )
    return [f"rel. error {error:.2f} ({row.codec}): one call sends {part}; {rest}"]


def describe_uncompressed(rows: Sequence[Row], unit: str = "parameters") -> str:
    """Return what could be compressed and is not, as a sentence; empty if there is nothing.

    What was asked for and is not possible is called so; messages that are too small are left as ``latency=True`` asks.
    Parameters that a policy leaves uncompressed count only if it leaves all of them so. ``unit`` says what the names of
    the rows are.
    """
    nothing = all(row.codec == "none" for row in rows)
    named = [
        row
        for row in rows
        if row.refused or row.reason == SMALL or (nothing and row.reason.startswith(_BY_POLICY))
    ]
    if not named:
        return ""
    as_asked = all(row.reason == SMALL for row in named)
    parts = [f"{row.what} of {_which(row, rows, unit)} ({row.reason})" for row in named]
    nothing_is = f"{'nothing is' if nothing else 'not'} compressed{'' if as_asked else ' although asked for'}"
    return f"{nothing_is}: {'; '.join(parts)}"


def _message_cells(row: MessageRow) -> tuple[str, ...]:
    """Return the cells of the table, in the order of `MESSAGE_COLUMNS`."""
    known = row.seconds is not None and row.calls > 0
    return (
        row.name,
        row.what,
        row.codec,
        row.dtype,
        *_number_cells(row),
        row.reason,
        f"{(row.seconds or 0.0) / row.calls * 1e3:.2f}" if known else "-",
        _format_counts(row.events),
    )


def _number_cells(row: Row | MessageRow) -> tuple[str, ...]:
    return (
        str(row.tensors),
        f"{row.numel:,}",
        str(row.calls),
        *_byte_cells(row.wire_bytes, row.plain_bytes),
        format_error(row.relative_error),
    )


def _byte_cells(wire_bytes: int, plain_bytes: int) -> tuple[str, str, str]:
    saved = f"{1 - wire_bytes / plain_bytes:.1%}" if plain_bytes else "-"
    return format_bytes(wire_bytes), format_bytes(plain_bytes), saved


def _left(columns: Mapping[str, str]) -> set[int]:
    return {index for index, name in enumerate(columns) if name in _LEFT}


def _format_counts(events: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}x" for kind, count in events.items())


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _which(row: Row, rows: Sequence[Row], unit: str) -> str:
    """Return which of the tensors in ``rows`` are in ``row``."""
    alike = [other for other in rows if other.what == row.what]
    total = len({name for other in alike for name in other.names})
    share = ""
    if sum(other.tensors for other in alike) > total:  # a layer may send some of its sums uncompressed
        share = f" in {row.calls} of {sum(other.calls for other in alike)} calls"
    elif row.numel and row.tensors < total:
        share = f" with {row.numel / sum(other.numel for other in alike):.0%} of the elements"
    if row.tensors == total:
        return (f"all {total} {unit}" if total > 1 else f"the only {unit.removesuffix('s')}") + share
    return f"{row.tensors} of {total} {unit}{share}, {_names(tuple(sorted(row.names)))}"
