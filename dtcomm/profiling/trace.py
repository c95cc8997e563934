"""Records of training steps, and their files in Chrome's trace format, which Perfetto and chrome://tracing open.

A `StepRecord` says when a step computed, when its messages were sent, and when it had to wait. Times are nanoseconds of
``time.monotonic_ns``, which the processes of a host share; 0 means not recorded.

A rank is a process of the trace. Its tracks are the steps, its computation, its hook, its waiting, and one for each
bucket. Phases of adjacent buckets overlap, so they are asynchronous events. Beside ``traceEvents`` a file holds the
steps themselves under ``dtcomm``, which `dtcomm trace` reads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dtcomm.system import write_file
from dtcomm.work import Span

FORMAT = 1
TRACKS = {1: "steps", 2: "forward and backward", 3: "hook", 4: "waiting for communication"}
NUMBERS = ("communication", "exposed", "hidden", "hook")
FIRST_MESSAGE = 10  # the track of the first bucket

Event = dict[str, Any]
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
    """One step, which ends when the next one begins; each micro-batch has an interval forward and one backward."""

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
        messages = []
        for message in values["messages"]:
            spans, waited = [Span(*span) for span in message["spans"]], WaitInterval(*message["waited"])
            messages.append(MessageRecord(**{**message, "spans": spans, "waited": waited}))
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


def write(path: str | os.PathLike[str], kind: str, rank: int, host: str, steps: Sequence[StepRecord]) -> str:
    """Write one rank's file next to ``path``, atomically; returns its path."""
    target = Path(path)
    target = target.with_name(f"{target.stem}.rank{rank}{target.suffix or '.json'}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"path: there is no folder {target.parent}")
    metadata = {
        "format": FORMAT,
        "what": kind,
        "rank": rank,
        "host": host,
        "boot": _boot_id(),
        "wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
        "steps": [step.to_dict() for step in steps],
    }
    _save(target, list(events(rank, host, steps)), [metadata])
    return str(target)


def merge(paths: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Merge the traces of several ranks into one, on the clock of the first, which begins at 0.

    Ranks of one host share a clock; those of other hosts are shifted by the difference of their wall clocks.

    Args:
        paths: The files of the ranks. A trace that torch.profiler exported on the first one's host may be among them;
            it is shifted to the same clock.
        path: The merged file.

    Raises:
        ValueError: No file is a trace of dtcomm.
    """
    ranks = read(paths)
    profiles = [profile for source in paths if "dtcomm" not in (profile := _load(source))]
    if not ranks:
        raise ValueError("paths: none of them is a trace of dtcomm")
    all_events: list[Event] = []
    first = min((step.begin for _, steps in ranks for step in steps), default=0)
    for metadata, steps in ranks:
        all_events += events(metadata["rank"], metadata["host"], steps, -first)
    to_monotonic = ranks[0][0]["wall_minus_monotonic_ns"]
    for profile in profiles:
        all_events += _shifted_profile(profile, to_monotonic + first)
    merged = [{**metadata, "steps": [step.to_dict() for step in steps]} for metadata, steps in ranks]
    _save(Path(path), all_events, merged)


def read(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[dict[str, Any], list[StepRecord]]]:
    """Return the metadata and the steps of every rank, in rank order, all on the clock of the first rank."""
    unsorted = [metadata for path in paths for metadata in _load(path).get("dtcomm", [])]
    for metadata in unsorted:
        if metadata["format"] != FORMAT:
            raise ValueError(
                f"trace of rank {metadata['rank']}: format {metadata['format']}, expected {FORMAT}"
            )
    ranks: list[tuple[dict[str, Any], list[StepRecord]]] = []
    for metadata in sorted(unsorted, key=lambda metadata: metadata["rank"]):
        first = ranks[0][0] if ranks else metadata
        same_clock = (metadata["host"], metadata["boot"]) == (first["host"], first["boot"])
        shift = 0 if same_clock else metadata["wall_minus_monotonic_ns"] - first["wall_minus_monotonic_ns"]
        steps = [_shifted(StepRecord.from_dict(values), shift) for values in metadata["steps"]]
        # The steps are on the clock of the first rank now.
        clock = {name: first[name] for name in ("boot", "wall_minus_monotonic_ns")}
        ranks.append(({**metadata, "steps": None, **clock}, steps))
    return ranks


def events(rank: int, host: str, steps: Sequence[StepRecord], shift: int = 0) -> Iterator[Event]:
    """Yield the events of one rank; ``shift`` nanoseconds are added to all times."""
    labels = list(dict.fromkeys(message.label for step in steps for message in step.messages))
    tracks = TRACKS | {FIRST_MESSAGE + index: label for index, label in enumerate(labels)}
    label = {"ph": "M", "pid": rank}
    yield {**label, "name": "process_name", "args": {"name": f"rank {rank} ({host})"}}
    yield {**label, "name": "process_sort_index", "args": {"sort_index": rank}}
    for track, name in tracks.items():
        yield {**label, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {**label, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}

    def slice_(track: int, name: str, begin: int, end: int, **args: Any) -> Iterator[Event]:
        if begin and end > begin:
            times = {"ts": (begin + shift) / 1e3, "dur": (end - begin) / 1e3}
            yield {"ph": "X", "cat": "dtcomm", "pid": rank, "tid": track, "name": name, **times, "args": args}

    for step in steps:
        end = step.end or max((message.done for message in step.messages), default=0)
        numbers = {f"{name}_ms": round(getattr(step, name) * 1e-6, 4) for name in NUMBERS}
        yield from slice_(1, f"step {step.number}", step.begin, end, **numbers)
        for begin, stop in step.forward:
            yield from slice_(2, "forward", begin, stop)
        for begin, stop in step.backward:
            yield from slice_(2, "backward", begin, stop)
        for message in step.messages:
            track = FIRST_MESSAGE + labels.index(message.label)
            yield from slice_(3, message.label, message.ready, message.launched)
            yield from slice_(4, message.label, *message.waited)
            yield from slice_(track, "queued", message.ready, message.started)
            yield from slice_(track, "in flight", message.started, message.finished, **_message_args(message))
            yield from slice_(track, "finishing", message.finished, message.done)
            for index, span in enumerate(message.spans):
                common = {
                    "cat": span.phase,
                    "pid": rank,
                    "id": f"{rank}.{step.number}.{message.label}.{index}",
                    "name": f"{span.phase} {message.label}",
                }
                busy = {"busy_ms": round(span.busy_ns * 1e-6, 4)}
                yield {**common, "ph": "b", "ts": (span.begin_ns + shift) / 1e3, "args": busy}
                yield {**common, "ph": "e", "ts": (span.end_ns + shift) / 1e3, "args": {}}


def _message_args(message: MessageRecord) -> dict[str, Any]:
    busy = {f"{phase}_ms": round(value * 1e-6, 4) for phase, value in message.phase_ns.items()}
    ratio = round(message.plain_bytes / message.wire_bytes, 3) if message.wire_bytes else None
    sizes = {"bytes": message.plain_bytes, "sent": message.wire_bytes, "ratio": ratio}
    return {"codec": message.codec, **sizes, **busy}


def _shifted(step: StepRecord, by: int) -> StepRecord:
    if by == 0:
        return step

    def shifted(moment: int) -> int:
        return moment + by if moment else 0

    step.begin, step.end = shifted(step.begin), shifted(step.end)
    step.forward = [(shifted(begin), shifted(end)) for begin, end in step.forward]
    step.backward = [(shifted(begin), shifted(end)) for begin, end in step.backward]
    for message in step.messages:
        for name in ("ready", "launched", "started", "finished", "done"):
            setattr(message, name, shifted(getattr(message, name)))
        waited = message.waited
        message.waited = waited._replace(begin=shifted(waited.begin), end=shifted(waited.end))
        message.spans = [
            span._replace(begin_ns=shifted(span.begin_ns), end_ns=shifted(span.end_ns))
            for span in message.spans
        ]
    return step


def _shifted_profile(profile: dict[str, Any], minus_ns: int) -> Iterator[Event]:
    # Its times are microseconds of the wall clock, from a base time that it contains.
    base = profile.get("baseTimeNanoseconds", 0)
    for event in profile.get("traceEvents", []):
        yield {**event, "ts": event["ts"] + (base - minus_ns) / 1e3} if "ts" in event else event


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: no trace, which is a file in JSON: {error}") from None
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError(f"{os.fspath(path)}: no trace: it has no traceEvents")
    return content


def _save(path: Path, all_events: list[Event], metadata: list[dict[str, Any]]) -> None:
    content = {"traceEvents": all_events, "displayTimeUnit": "ms", "dtcomm": metadata}
    write_file(path, json.dumps(content) + "\n")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
