"""The record of one training step: when it computed, when its messages were sent, and when it had to wait.

All times are nanoseconds of ``time.monotonic_ns``, which the processes of a host share; 0 means not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dtcomm.work import Span

Interval = tuple[int, int]


class WaitInterval(NamedTuple):
    """The caller's thread waited from ``begin`` to ``end``."""

    begin: int
    end: int


NO_WAIT = WaitInterval(0, 0)


@dataclass
class MessageRecord:
    """One bucket, or the collective of one module.

    Attributes:
        label: Its name, such as "bucket 0".
        codec: Its codecs.
        plain_bytes: Its uncompressed size.
        wire_bytes: What this rank sent.
        ready: When its tensors were ready.
        launched: When the caller's thread continued.
        started: When the operation started.
        finished: When the operation ended.
        done: When the result was where the caller reads it.
        spans: The phases of the operation.
        waited: When the caller waited for it.
    """

    label: str
    codec: str = ""
    plain_bytes: int = 0
    wire_bytes: int = 0
    ready: int = 0
    launched: int = 0
    started: int = 0
    finished: int = 0
    done: int = 0
    spans: list[Span] = field(default_factory=list)
    waited: WaitInterval = NO_WAIT

    @property
    def phase_ns(self) -> dict[str, int]:
        """The nanoseconds of each phase, and as "wire" what no phase accounts for."""
        phases: dict[str, int] = {}
        for span in self.spans:
            phases[span.phase] = phases.get(span.phase, 0) + span.busy_ns
        inside = sum(span.busy_ns for span in self.spans if span.phase != "factors")
        phases["wire"] = max(0, self.finished - self.started - inside)
        return phases


@dataclass
class StepRecord:
    """One step.

    Attributes:
        number: Its number.
        begin: When it began.
        end: When the next step began.
        forward: One interval for each micro-batch.
        backward: One interval for each micro-batch.
        messages: Its messages.
    """

    number: int
    begin: int
    end: int = 0
    forward: list[Interval] = field(default_factory=list)
    backward: list[Interval] = field(default_factory=list)
    messages: list[MessageRecord] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The length of the step; 0 if it has not ended."""
        return self.end - self.begin if self.end else 0

    @property
    def communication(self) -> int:
        """How long at least one message was in flight."""
        return union_length((message.started, message.done) for message in self.messages if message.started)

    @property
    def exposed(self) -> int:
        """How long the caller waited for communication."""
        return union_length(message.waited for message in self.messages if message.waited.end)

    @property
    def hidden(self) -> int:
        """Communication during which the caller computed."""
        return max(0, self.communication - self.exposed)

    @property
    def hook(self) -> int:
        """The caller's own time for starting messages."""
        return sum(message.launched - message.ready for message in self.messages if message.launched)

    @property
    def computing(self) -> int:
        """Forward and backward of all micro-batches."""
        return union_length([*self.forward, *self.backward])

    def assign_waits(self, since: int) -> None:
        """Record that the caller did nothing but wait from ``since`` until the last message was done."""
        begin = since
        for message in sorted(self.messages, key=lambda message: message.done):
            if message.done > begin:
                message.waited = WaitInterval(begin, message.done)
                begin = message.done

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> StepRecord:
        """Return the step of `to_dict`, also after JSON."""
        messages = [
            MessageRecord(
                **{
                    **message,
                    "spans": [Span(*span) for span in message["spans"]],
                    "waited": WaitInterval(*message["waited"]),
                }
            )
            for message in values["messages"]
        ]
        pairs = {name: [(begin, end) for begin, end in values[name]] for name in ("forward", "backward")}
        return StepRecord(values["number"], values["begin"], values["end"], **pairs, messages=messages)


def union_length(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of intervals."""
    total = last = 0
    for begin, end in sorted(intervals):
        begin = max(begin, last)
        if end > begin:
            total += end - begin
            last = end
    return total
