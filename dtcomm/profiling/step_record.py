"""One step of training as a timeline keeps it: when it computed, when its messages went, when it had to wait.

All times are nanoseconds of ``time.monotonic_ns``, which the processes of a host share; 0 is what was not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dtcomm.collectives import Span

Interval = tuple[int, int]


class Waited(NamedTuple):
    """The caller's thread stood still from `begin` to `end`."""

    begin: int
    end: int


NEVER = Waited(0, 0)


@dataclass
class Message:
    """One bucket, or one module's collective, on its way.

    ``ready``: its tensors were there; ``launched``: the caller's thread went on; ``started`` and ``finished``: the
    operation's own; ``done``: the result was where the caller reads it. ``plain_bytes`` is what it has uncompressed,
    ``wire_bytes`` what this rank sent. ``waited`` is when somebody stood still for it.
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
    waited: Waited = NEVER

    @property
    def busy(self) -> dict[str, int]:
        """Nanoseconds of each phase, and "wire": what of the operation no phase accounts for."""
        phases: dict[str, int] = {}
        for span in self.spans:
            phases[span.phase] = phases.get(span.phase, 0) + span.busy_ns
        inside = sum(span.busy_ns for span in self.spans if span.phase != "factors")
        phases["wire"] = max(0, self.finished - self.started - inside)
        return phases


@dataclass
class Step:
    """``forward`` and ``backward`` have one interval for each micro-batch; ``end`` is when the next step began."""

    number: int
    begin: int
    end: int = 0
    forward: list[Interval] = field(default_factory=list)
    backward: list[Interval] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @property
    def length(self) -> int:
        """0 while it lasts."""
        return self.end - self.begin if self.end else 0

    @property
    def communication(self) -> int:
        """How long at least one message was under way."""
        return covered((each.started, each.done) for each in self.messages if each.started)

    @property
    def exposed(self) -> int:
        """How long the caller stood still for communication."""
        return covered(each.waited for each in self.messages if each.waited.end)

    @property
    def hidden(self) -> int:
        """Communication behind which something else went on."""
        return max(0, self.communication - self.exposed)

    @property
    def hook(self) -> int:
        """The caller's own time for starting the messages."""
        return sum(each.launched - each.ready for each in self.messages if each.launched)

    @property
    def computing(self) -> int:
        """Forward and backward of all micro-batches."""
        return covered([*self.forward, *self.backward])

    def assign_waits(self, since: int) -> None:
        """The caller had nothing else to do from ``since`` on until the last message was done."""
        at = since
        for each in sorted(self.messages, key=lambda message: message.done):
            if each.done > at:
                each.waited = Waited(at, each.done)
                at = each.done

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Step:
        """What `to_dict` gave, also by way of JSON."""
        messages = [
            Message(
                **{
                    **message,
                    "spans": [Span(*span) for span in message["spans"]],
                    "waited": Waited(*message["waited"]),
                }
            )
            for message in values["messages"]
        ]
        pairs = {name: [(begin, end) for begin, end in values[name]] for name in ("forward", "backward")}
        return Step(values["number"], values["begin"], values["end"], **pairs, messages=messages)


def covered(intervals: Iterable[Interval]) -> int:
    """The length of the union."""
    total = last = 0
    for begin, end in sorted(intervals):
        begin = max(begin, last)
        if end > begin:
            total += end - begin
            last = end
    return total
