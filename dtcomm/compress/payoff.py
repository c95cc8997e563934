"""Predicts what messages cost with and without compression, for the reports of DDP and `LocalSGD`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from dtcomm.collectives.groups import expected_call
from dtcomm.compress.bucket import NONE, BucketLayout
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.report import Payoff
from dtcomm.compress.spec import LevelCodecs, wire_codec
from dtcomm.compress.traffic import total_seconds
from dtcomm.profiling import Summary


@dataclass(frozen=True)
class ExpectedTimes:
    """Seconds of one message, with its codecs and with none, and where they come from."""

    compressed: float
    uncompressed: float
    source: str


def expected_times(layout: BucketLayout, group: dist.ProcessGroup | None) -> ExpectedTimes | None:
    """Return what a message of this layout costs.

    None if that is not known: for PowerSGD, whose products cost more than its messages, for tensors on a device, and
    before the group has communicated.
    """
    if layout.seconds is None or any(isinstance(segment.codec, PowerSGD) for segment in layout.segments):
        return None
    numel: Counter[str] = Counter()
    for segment in layout.segments:
        scheme = segment.codec
        assert not isinstance(scheme, PowerSGD)
        numel[str(scheme if isinstance(scheme, LevelCodecs) else wire_codec(scheme))] += segment.numel
    parts = [
        expected_call("all_reduce", count, layout.dtype, spec, group=group) for spec, count in numel.items()
    ]
    latency = expected_call("all_reduce", 1, layout.dtype, NONE, group=group)
    plain = expected_call("all_reduce", sum(numel.values()), layout.dtype, NONE, group=group)
    if latency is None or plain is None:
        return None
    # The parts travel in one message, which has its latency once.
    compressed = sum(part.seconds for part in parts if part) - (len(parts) - 1) * latency.seconds
    return ExpectedTimes(compressed, plain.seconds, plain.source)


def predict_payoff(
    layouts: Sequence[BucketLayout],
    group: dist.ProcessGroup | None,
    period: str,
    summary: Summary | None = None,
) -> Payoff | None:
    """Return whether compression pays by prediction, beside what was measured with it; None if that is not known.

    ``layouts`` are those in use, in the order of their messages. One message of each belongs to a ``period``, such as
    ``"a step"``. ``summary`` is the timeline's, which tells when backward hides communication; None: nothing hides it.
    """
    if not layouts or all(layout.messages == 0 for layout in layouts):
        return None
    times = [expected_times(layout, group) for layout in layouts]
    known = [expected for expected in times if expected is not None]
    if len(known) < len(times):
        return None
    seconds = total_seconds(
        None if layout.seconds is None else layout.seconds / max(1, layout.messages) for layout in layouts
    )
    if summary is not None and len(summary.messages) == len(layouts) and summary.micro_batches == 1:
        ready = [message.ready_ms for message in summary.messages]
        compressed, uncompressed = (
            exposed_ms(ready, durations, summary.backward_ms)
            for durations in (
                [expected.compressed * 1e3 for expected in known],
                [expected.uncompressed * 1e3 for expected in known],
            )
        )
        scope = f"exposed communication in {period}"
        measured_ms: float | None = summary.exposed_ms
    else:
        compressed = sum(expected.compressed for expected in known) * 1e3
        uncompressed = sum(expected.uncompressed for expected in known) * 1e3
        scope = f"communication in {period}, hidden or exposed"
        measured_ms = None if seconds is None else seconds * 1e3
    return Payoff(
        compressed_ms=compressed,
        uncompressed_ms=uncompressed,
        source="predicted",
        basis=known[0].source,
        scope=scope,
        measured_ms=measured_ms,
    )


def exposed_ms(ready: Iterable[float], durations: Iterable[float], backward_ms: float) -> float:
    """Return how long a step waits after backward, if messages follow each other on one link.

    ``ready`` says when each message is ready, in milliseconds from the beginning of backward.

    Example:
        >>> from dtcomm.compress.payoff import exposed_ms
        >>> exposed_ms([2.0, 5.0], [4.0, 3.0], backward_ms=5.0)
        4.0
    """
    link_free = 0.0
    for begin, duration in sorted(zip(ready, durations, strict=True)):
        link_free = max(link_free, begin) + duration
    return max(0.0, link_free - backward_ms)
