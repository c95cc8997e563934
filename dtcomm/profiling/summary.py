"""Summary of a timeline: shares of a step, and scaling efficiency.

The efficiency is that of weak scaling as one rank can see it: the time that a step would have taken without waiting for
others and without starting messages, over the time that it took. What encoding takes from computation by using the same
cores is not part of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.profiling.trace import MessageRecord, StepRecord


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit, such as ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return the lines of a table; the columns in ``left`` are left-aligned, the others right-aligned."""
    table = [head, *rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


ADVICE_THRESHOLD = 0.10  # the exposed share of a step above which advice is given


@dataclass(frozen=True, kw_only=True)
class MessageSummary:
    """Medians of one message, in milliseconds.

    Attributes:
        ready_ms: From the beginning of the backward pass (of the step, if that was not recorded) until it was ready.
        queued_ms: From then until its operation started.
        took_ms: From then until it was done.
        exposed_ms: How long the caller waited for it.
        phases: Milliseconds of encode, reduce, decode, "factors" of PowerSGD, and wire.
    """

    label: str
    codec: str
    plain_bytes: int
    wire_bytes: int
    ready_ms: float
    queued_ms: float
    took_ms: float
    exposed_ms: float
    phases: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians over the steps of a timeline; ``str()`` prints a table and the advice.

    Attributes:
        steps: Number of steps.
        step_ms: Milliseconds of a step, like the following times.
        forward_ms: The forward pass.
        backward_ms: The backward pass, without waiting for communication.
        communication_ms: Time during which at least one message was in flight.
        exposed_ms: The part of it during which the step waited.
        hidden_ms: The rest of it.
        hook_ms: The caller's own time for starting messages.
        micro_batches: Backward passes in a step.
        messages: Medians for each message.
    """

    steps: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    communication_ms: float
    exposed_ms: float
    hidden_ms: float
    hook_ms: float
    micro_batches: int
    messages: tuple[MessageSummary, ...] = ()

    @property
    def share(self) -> float:
        """The share of a step in which the caller waits for communication."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0

    @property
    def efficiency(self) -> float:
        """The share of a step that is neither waiting for communication nor starting messages."""
        return max(0.0, 1 - (self.exposed_ms + self.hook_ms) / self.step_ms) if self.step_ms else 0.0

    @property
    def advice(self) -> str:
        """One sentence; empty if there is nothing to advise."""
        if self.share <= ADVICE_THRESHOLD:
            return ""
        finding = f"communication is exposed for {self.share:.0%} of a step ({self.exposed_ms:.1f} ms)"
        return f"{finding}; compress more, make buckets smaller, or accumulate gradients under no_sync()"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        extra = {name: getattr(self, name) for name in ("share", "efficiency", "advice")}
        return asdict(self) | extra

    def __str__(self) -> str:
        head = ("message", "codec", "bytes", "sent", "ready", "queued", "took", "exposed", "of which")
        rows = [
            (
                message.label,
                message.codec,
                *(format_bytes(size) for size in (message.plain_bytes, message.wire_bytes)),
                *(f"{getattr(message, f'{name}_ms'):.2f}" for name in head[4:8]),
                ", ".join(f"{phase} {value:.2f}" for phase, value in message.phases.items()),
            )
            for message in self.messages
        ]
        lines = [
            *format_table(head, rows, left={0, 1, 8}),
            f"{self.steps} steps, ms: step {self.step_ms:.2f}, forward {self.forward_ms:.2f}, "
            f"backward {self.backward_ms:.2f}, communication {self.communication_ms:.2f} "
            f"({self.hidden_ms:.2f} hidden, {self.exposed_ms:.2f} exposed), in the hook {self.hook_ms:.2f}",
            f"communication's share {self.share:.1%}, efficiency {self.efficiency:.1%}",
        ]
        return "\n".join([*lines, self.advice] if self.advice else lines)


def summarize(steps: Sequence[StepRecord]) -> Summary:
    """Return medians over the complete steps that have the most common messages; ValueError if there are none."""
    complete = [step for step in steps if step.length and step.messages]
    if not complete:
        raise ValueError(
            f"summary: none of {len(steps)} steps is complete; a step ends when the next one begins"
        )
    common = statistics.mode(_labels(step) for step in complete)
    typical = [step for step in complete if _labels(step) == common]

    def median(of: Callable[[StepRecord], float]) -> float:
        return _ms(of(step) for step in typical)

    return Summary(
        steps=len(typical),
        step_ms=median(lambda step: step.length),
        forward_ms=median(lambda step: sum(end - begin for begin, end in step.forward)),
        backward_ms=median(lambda step: sum(end - begin for begin, end in step.backward)),
        communication_ms=median(lambda step: step.communication),
        exposed_ms=median(lambda step: step.exposed),
        hidden_ms=median(lambda step: step.hidden),
        hook_ms=median(lambda step: step.hook),
        micro_batches=statistics.mode(max(1, len(step.backward)) for step in typical),
        messages=tuple(
            _message_summary([(step, step.messages[index]) for step in typical])
            for index in range(len(common))
        ),
    )


def _labels(step: StepRecord) -> tuple[str, ...]:
    return tuple(message.label for message in step.messages)


def _message_summary(pairs: Sequence[tuple[StepRecord, MessageRecord]]) -> MessageSummary:
    messages = [message for _, message in pairs]
    last = messages[-1]
    phases = dict.fromkeys(phase for message in messages for phase in message.phase_ns)
    return MessageSummary(
        label=last.label,
        codec=last.codec,
        plain_bytes=last.plain_bytes,
        wire_bytes=last.wire_bytes,
        ready_ms=_ms(
            message.ready - (step.backward[-1][0] if step.backward else step.begin) for step, message in pairs
        ),
        queued_ms=_ms(max(0, message.started - message.ready) for message in messages),
        took_ms=_ms(message.done - message.started for message in messages),
        exposed_ms=_ms(message.waited.end - message.waited.begin for message in messages),
        phases={phase: _ms(message.phase_ns.get(phase, 0) for message in messages) for phase in phases},
    )


def _ms(values: Iterable[float]) -> float:
    return round(statistics.median(values) * 1e-6, 4)
