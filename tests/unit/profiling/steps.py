"""Steps with round numbers: milliseconds in, nanoseconds out."""

from __future__ import annotations

from dtcomm.profiling import MessageRecord, StepRecord
from dtcomm.work import Span

MS = 1_000_000


def message(label: str, ready: float, started: float, finished: float, done: float) -> MessageRecord:
    """Return a message whose encoding takes a tenth of the time from start to finish; times are in milliseconds."""
    ns = [round(time * MS) for time in (ready, ready + 0.1, started, finished, done)]
    encode = Span("encode", ns[2], ns[2] + (ns[3] - ns[2]) // 2, (ns[3] - ns[2]) // 10)
    return MessageRecord(label, "int8", 4000, 1000, ns[0], ns[1], ns[2], ns[3], ns[4], [encode])


def step(number: int, micro_batches: int = 1) -> StepRecord:
    """Return a step of 100 ms, and 40 ms more for each micro-batch after the first.

    In the last micro-batch backward ends at 60 ms, the messages at 70 and 90 ms.
    """
    extra = 40 * (micro_batches - 1)
    begin = 1000.0 + 200 * number
    last_begin = begin + extra
    record = StepRecord(number, round(begin * MS), round((last_begin + 100) * MS))
    for k in range(micro_batches):
        record.forward.append((round((begin + 40 * k) * MS), round((begin + 40 * k + 20) * MS)))
        record.backward.append((round((begin + 40 * k + 20) * MS), round((begin + 40 * k + 40) * MS)))
    record.backward[-1] = (record.backward[-1][0], round((last_begin + 60) * MS))
    record.messages = [
        message("bucket 0", last_begin + 30, last_begin + 31, last_begin + 69, last_begin + 70),
        message("bucket 1", last_begin + 50, last_begin + 55, last_begin + 90, last_begin + 90),
    ]
    record.assign_waits(record.backward[-1][1])
    return record
