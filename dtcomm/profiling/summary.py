"""What a timeline comes to: shares of a step, how well training scales, and whether accumulating gradients would pay.

The efficiency is that of weak scaling as this rank can see it: the time that a step would have taken without waiting
for others and without starting messages, over the time that it took. What encoding takes from computing by using the
same cores is not in it. The advice assumes that k micro-batches take k times forward and backward, and that only the
last one's backward has communication behind it, whose exposed part stays as long as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.profiling.step_record import Message, Step
from dtcomm.profiling.tables import human, lined

WORTH_SAYING = 0.10  # of a step in which communication is exposed
AIM = 0.05  # the share that accumulation is to bring it down to
MOST_MICRO_BATCHES = 256


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Medians of one bucket, in milliseconds; ``ready`` counts from the beginning of backward (of the step, where
    that was not seen), ``phases`` are encode, reduce, decode, ``factors`` of PowerSGD, and wire.
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
    """Medians over ``steps`` steps, in milliseconds. ``share`` and ``efficiency`` are of the step."""

    steps: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    communication_ms: float
    exposed_ms: float
    hidden_ms: float
    hook_ms: float
    micro_batches: int
    messages: tuple[MessageTimes, ...] = ()

    @property
    def share(self) -> float:
        """Of the step, for which communication holds everything up."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0

    @property
    def efficiency(self) -> float:
        return max(0.0, 1 - (self.exposed_ms + self.hook_ms) / self.step_ms) if self.step_ms else 0.0

    def predicted_ms(self, micro_batches: int) -> float:
        """A step's time, were gradients accumulated over so many micro-batches."""
        one = (self.forward_ms + self.backward_ms) / self.micro_batches
        return self.step_ms + (micro_batches - self.micro_batches) * one

    def predicted_share(self, micro_batches: int) -> float:
        """`share`, then."""
        whole = self.predicted_ms(micro_batches)
        return self.exposed_ms / whole if whole > 0 else 0.0

    @property
    def accumulate(self) -> int:
        """Micro-batches a step from which on communication is at most 5 % of it; as many as now where it is that, or
        where forward and backward were not seen.
        """
        if self.share <= AIM or not self.forward_ms + self.backward_ms:
            return self.micro_batches
        return next(
            (k for k in range(self.micro_batches, MOST_MICRO_BATCHES) if self.predicted_share(k) <= AIM),
            MOST_MICRO_BATCHES,
        )

    @property
    def advice(self) -> str:
        """A sentence; empty where there is nothing to say."""
        if self.share <= WORTH_SAYING:
            return ""
        said = f"communication is exposed for {self.share:.0%} of a step ({self.exposed_ms:.1f} ms)"
        wanted = self.accumulate
        if wanted == self.micro_batches:
            return f"{said}; compress more, or make buckets smaller"
        faster = wanted / self.micro_batches * self.step_ms / self.predicted_ms(wanted)
        return (
            f"{said}; accumulating {wanted} micro-batches a step under no_sync() (now {self.micro_batches}) would make "
            f"that {self.predicted_share(wanted):.0%} and training about {faster:.2f} times as fast, with a "
            f"batch {wanted / self.micro_batches:.3g} times as large"
        )

    def to_dict(self) -> dict[str, Any]:
        extra = {name: getattr(self, name) for name in ("share", "efficiency", "accumulate", "advice")}
        return asdict(self) | extra

    def __str__(self) -> str:
        head = ("message", "codec", "bytes", "sent", "ready", "queued", "took", "exposed", "of which")
        rows = [
            (
                each.label,
                each.codec,
                human(each.plain_bytes),
                human(each.wire_bytes),
                *(f"{value:.2f}" for value in (each.ready_ms, each.queued_ms, each.took_ms, each.exposed_ms)),
                ", ".join(f"{phase} {value:.2f}" for phase, value in each.phases.items()),
            )
            for each in self.messages
        ]
        lines = [
            *lined(head, rows, left={0, 1, 8}),
            f"{self.steps} steps, ms: step {self.step_ms:.2f}, forward {self.forward_ms:.2f}, "
            f"backward {self.backward_ms:.2f}, communication {self.communication_ms:.2f} "
            f"({self.hidden_ms:.2f} hidden, {self.exposed_ms:.2f} exposed), in the hook {self.hook_ms:.2f}",
            f"communication's share {self.share:.1%}, efficiency {self.efficiency:.1%}",
        ]
        return "\n".join([*lines, self.advice] if self.advice else lines)


def summarise(steps: Sequence[Step]) -> Summary:
    """Medians of those whole steps that have the usual messages."""
    whole = [step for step in steps if step.length and step.messages]
    if not whole:
        raise ValueError(f"summary: of {len(steps)} steps none is whole; it takes two in a row")
    usual = statistics.mode(_labels(step) for step in whole)
    alike = [step for step in whole if _labels(step) == usual]

    def median(of: Callable[[Step], float]) -> float:
        return _ms(of(step) for step in alike)

    return Summary(
        steps=len(alike),
        step_ms=median(lambda step: step.length),
        forward_ms=median(lambda step: sum(end - begin for begin, end in step.forward)),
        backward_ms=median(lambda step: sum(end - begin for begin, end in step.backward)),
        communication_ms=median(lambda step: step.communication),
        exposed_ms=median(lambda step: step.exposed),
        hidden_ms=median(lambda step: step.hidden),
        hook_ms=median(lambda step: step.hook),
        micro_batches=statistics.mode(max(1, len(step.backward)) for step in alike),
        messages=tuple(_message([(step, step.messages[at]) for step in alike]) for at in range(len(usual))),
    )


def _labels(step: Step) -> tuple[str, ...]:
    return tuple(message.label for message in step.messages)


def _message(found: Sequence[tuple[Step, Message]]) -> MessageTimes:
    messages = [message for _, message in found]
    last = messages[-1]
    phases = dict.fromkeys(phase for message in messages for phase in message.busy)
    return MessageTimes(
        label=last.label,
        codec=last.codec,
        plain_bytes=last.plain_bytes,
        wire_bytes=last.wire_bytes,
        ready_ms=_ms(
            each.ready - (step.backward[-1][0] if step.backward else step.begin) for step, each in found
        ),
        queued_ms=_ms(max(0, each.started - each.ready) for each in messages),
        took_ms=_ms(each.done - each.started for each in messages),
        exposed_ms=_ms(each.waited.end - each.waited.begin for each in messages),
        phases={phase: _ms(each.busy.get(phase, 0) for each in messages) for phase in phases},
    )


def _ms(values: Iterable[float]) -> float:
    return round(statistics.median(values) * 1e-6, 4)
